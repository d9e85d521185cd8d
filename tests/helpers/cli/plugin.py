"""A file with a method of a user's own, as `--plugin` takes it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from millpond.methods import METHODS

NAME = "of_ones_own"
#: Under which the file is imported.
MODULE = "millpond_plugin_mine"
PLUGIN = f"""
from millpond.plugins import Policy, Protect, Recency, method

@method("{NAME}")
def {NAME}() -> Policy:
    \"\"\"Keep the newest entries.\"\"\"
    return Policy(Recency(), Protect())
"""


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file; nothing of it stays registered."""
    METHODS.names()
    monkeypatch.setattr(METHODS, "_entries", dict(METHODS._entries))
    path = tmp_path / "mine.py"
    path.write_text(PLUGIN)
    yield path
    sys.modules.pop(MODULE, None)
