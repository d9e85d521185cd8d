"""Progress display of the training of `pond-text`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from millpond_lab.train.text.run import TextRun


@contextmanager
def training_progress(run: TextRun, visible: bool) -> Iterator[Callable[[TextRun], None]]:
    """A progress bar over the planned tokens; yields the function that moves it."""
    text = TextColumn("{task.description}  {task.completed:,.0f} of {task.total:,.0f} tokens  {task.fields[about]}")
    columns = (text, BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, disable=not visible, refresh_per_second=2) as bar:
        task = bar.add_task("pond-text", total=run.planned, completed=run.tokens, about="")

        def show(run: TextRun) -> None:
            line = run.log[-1]
            about = f"window {line.length:,}  loss {line.loss:.3f}  {run.tokens / run.time_s:,.0f} tokens/s"
            bar.update(task, completed=run.tokens, about=about)

        yield show
