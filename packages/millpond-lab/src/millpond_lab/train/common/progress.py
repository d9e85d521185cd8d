"""Progress of trainings: bars, steps, and learning curves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeVar

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers.utils import logging

from millpond_lab.train.common.network_run import CurvePoint


@contextmanager
def no_bars() -> Iterator[None]:
    """No bars inside; the user's own setting comes back."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]


@contextmanager
def step_progress(visible: bool, done: int, steps: int) -> Iterator[Callable[[CurvePoint], None]]:
    """A progress bar over the steps, of which some are `done`; yields the function that moves it."""
    text = TextColumn("step {task.completed} of {task.total}  loss {task.fields[loss]:.3f}  {task.description}")
    with Progress(text, BarColumn(), TimeElapsedColumn(), TimeRemainingColumn(), disable=not visible) as bar:
        task = bar.add_task("", total=steps, completed=done, loss=0.0)

        def show(line: CurvePoint) -> None:
            bar.update(task, completed=line.step, loss=line.loss, description=line.said)

        yield show


#: Rows of a curve.
ROWS = 10


class LogLine(Protocol):
    """What every log has: the step, and the seconds since the beginning of the run."""

    @property
    def step(self) -> int: ...

    @property
    def time_s(self) -> float: ...


Line = TypeVar("Line", bound=LogLine)


def curve_rows(log: Sequence[Line], columns: Sequence[tuple[Callable[[Line], float], str]]) -> list[str]:
    """Rows of a Markdown table: the last step of each part, its minutes, and the mean of each column.

    Args:
        columns: a number of a line, and the format of its mean.
    """
    size = -(-len(log) // ROWS) or 1
    rows = []
    for begin in range(0, len(log), size):
        part = log[begin : begin + size]
        means = [format(sum(map(value, part)) / len(part), form) for value, form in columns]
        rows.append(f"| {part[-1].step:,} | {part[-1].time_s / 60:.1f} | {' | '.join(means)} |")
    return rows
