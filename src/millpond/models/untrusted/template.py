"""Check of a chat template: it renders trial chats in a process of its own with limits of time and memory."""

from __future__ import annotations

import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

from millpond.errors import DataError

#: Seconds of the clock after which the process is ended, should it wait for something.
_MAX_WAIT = 60.0
_SCRIPT = Path(__file__).with_name("template_child.py")


def check_templates(tokenizer: Any, folder: str) -> None:
    """Refuse a tokenizer with a chat template that does not end, or fills the memory.

    Args:
        tokenizer: Tokenizer to check.
        folder: Folder that it came from, for errors.

    Raises:
        DataError: one of them does, or is none.
    """
    templates = getattr(tokenizer, "chat_template", None) or {}
    for name, template in templates.items() if isinstance(templates, dict) else [("default", templates)]:
        where = _file_of(Path(folder), str(name))
        if not isinstance(template, str):
            raise DataError(f"{where}: the chat template is a {type(template).__name__}, and must be a text")
        if (wrong := _wrong_with(template)) is not None:
            raise DataError(f"{where}: the chat template {wrong}; leave it out, or take one that ends")


def _file_of(folder: Path, name: str) -> Path:
    """Return the file of a folder that holds the template of that name."""
    paths = [folder / "additional_chat_templates" / f"{name}.jinja", folder / "chat_template.jinja"]
    return next((file for file in paths if file.is_file()), folder / "tokenizer_config.json")


@lru_cache(maxsize=64)
def _wrong_with(template: str) -> str | None:
    """Return why a template is refused; None if it renders chats, or says which it refuses."""
    command = [sys.executable, "-I", str(_SCRIPT)]
    try:
        tried = subprocess.run(
            command, input=template.encode("utf-8", "replace"), capture_output=True, timeout=_MAX_WAIT, check=False
        )
    except subprocess.TimeoutExpired:
        return f"wrote no chat in {_MAX_WAIT:g} s"
    if tried.returncode == 0:
        return None
    stdout_text = tried.stdout.decode("utf-8", "replace").strip()
    return stdout_text or "takes more time or memory than any chat needs"
