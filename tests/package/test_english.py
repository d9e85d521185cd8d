"""English of what a user reads first: help texts of the command line, and first lines of modules."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

import millpond
from millpond.cli.app import app

PACKAGE = Path(millpond.__file__).parent
PARTS = (".", *sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py")))
#: Words that say little, or another thing than the field's word.
VAGUE = re.compile(
    r"\b(anybody|asked|beside|carried out|everybody|nobody|so many|somebody|told|what leaves)\b|^(Of|Who)\b",
    re.IGNORECASE,
)


def helps(name: str, command: Any) -> Iterator[tuple[str, str]]:
    yield name, (command.help or "").split("\n\n")[0]
    for option in command.params:
        yield f"{name} --{option.name}", getattr(option, "help", None) or ""
    for child, below in getattr(command, "commands", {}).items():
        yield from helps(f"{name} {child}", below)


def test_help_texts_are_in_plain_words() -> None:
    found = [(name, text) for name, text in helps("millpond", typer.main.get_command(app)) if VAGUE.search(text)]
    assert found == []


@pytest.mark.parametrize("part", PARTS)
def test_first_lines_of_modules_are_in_plain_words(part: str) -> None:
    found = []
    modules = PACKAGE.glob("*.py") if part == "." else (PACKAGE / part).rglob("*.py")
    for module in sorted(modules):
        line = (ast.get_docstring(ast.parse(module.read_text(encoding="utf-8"))) or "").split("\n\n")[0]
        if VAGUE.search(line) or line.startswith(("What ", "How ", "Whether ")):
            found.append((str(module.relative_to(PACKAGE)), line))
    assert found == []
