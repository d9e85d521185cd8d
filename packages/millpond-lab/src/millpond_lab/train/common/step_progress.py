"""Progress display of the training of networks on a frozen model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from millpond_lab.train.common.network_run import CurvePoint


@contextmanager
def step_progress(visible: bool, done: int, steps: int) -> Iterator[Callable[[CurvePoint], None]]:
    """A progress bar over the steps, of which some are `done`; yields the function that moves it."""
    text = TextColumn("step {task.completed} of {task.total}  loss {task.fields[loss]:.3f}  {task.description}")
    with Progress(text, BarColumn(), TimeElapsedColumn(), TimeRemainingColumn(), disable=not visible) as bar:
        task = bar.add_task("", total=steps, completed=done, loss=0.0)

        def show(line: CurvePoint) -> None:
            bar.update(task, completed=line.step, loss=line.loss, description=line.said)

        yield show
