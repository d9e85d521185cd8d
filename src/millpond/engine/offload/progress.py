"""Bar on stderr for what takes long before a model runs: measuring the machine, packing weights."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from millpond.models.weights.packed_file import Report


@contextmanager
def bar() -> Iterator[Report]:
    """What shows how far something is: a bar on a terminal where rich is installed, else nothing."""
    if not sys.stderr.isatty() or find_spec("rich") is None:
        yield lambda what, share: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=1.0, visible=False)

        def report(what: str, share: float) -> None:
            progress.update(task, description=what, completed=share, visible=True)

        yield report
