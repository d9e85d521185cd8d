"""Rows of a learning curve for the card of trained networks: means over equal parts of a run's log."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

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
