"""Progress of work on models that takes seconds, on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec


@contextmanager
def progress(text: str) -> Iterator[None]:
    """Show `text` with a spinner on stderr until the block ends, where that is a terminal and rich is installed."""
    if not sys.stderr.isatty() or find_spec("rich") is None:
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(text):
        yield
