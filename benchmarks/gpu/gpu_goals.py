"""What the cells of `run_all.py` should reach, and whether their rows do: for the run, and the tables of the docs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]

#: What a figure is called in a sentence; another one is called by its name.
SHOWN = {"ratio": "its bound", "share_of_bound": "of its bound", "gb_per_s": "GB/s"}


@dataclass(frozen=True)
class Goal:
    """One goal of the cells whose name a pattern matches whole.

    Attributes:
        section, cell: which cells; `cell` is a regular expression.
        figure: of their rows, as it stands or over that of another cell.
        least, most: what it, or the quotient, should reach or not exceed; one of the two.
        over: other cells of the section, with the groups of `cell` as `\\1`: the best that has a row counts.
        called: the other cells in words; empty: their names. once: whether one cell of all that match is enough.
    """

    section: str
    cell: str
    figure: str
    least: float | None = None
    most: float | None = None
    over: tuple[str, ...] = ()
    called: str = ""
    once: bool = False

    def others(self, cell: str) -> list[str]:
        """The cells that a cell of this goal is compared with."""
        found = re.fullmatch(self.cell, cell)
        assert found is not None, "a cell of this goal"
        return [found.expand(other) for other in self.over]

    def said(self, cell: str) -> str:
        """The goal in words."""
        bound = f"at least {self.least:g}" if self.most is None else f"at most {self.most:g}"
        if self.figure == "share_of_bound" and self.least is not None:
            return f"at least {self.least:.0%} of its bound"
        if not self.over:
            return f"{bound} {'x ' if self.figure == 'ratio' else ''}{SHOWN.get(self.figure, self.figure)}"
        return f"{bound} x {self.called or ' or '.join(self.others(cell))}{' in one cell' if self.once else ''}"


@dataclass(frozen=True)
class Verdict:
    """What became of a goal.

    Attributes:
        value: what was reached, in the unit of the goal. met: whether that is enough.
    """

    goal: Goal
    cell: str
    value: float
    met: bool

    @property
    def reached(self) -> str:
        """The value as it is shown."""
        return f"{self.value:.0%}" if self.goal.figure == "share_of_bound" else f"{self.value:.3g}"

    @property
    def word(self) -> str:
        return "met" if self.met else "not met"


#: Settings whose step, tokens and prompt have goals; names as in `gpu_settings.py`.
_H2O, _CODES = "h2o 20%", "h2o 20%, int4"
_OWN = r"(?:full|h2o 20%|snapkv 20%|int4|streaming 20%)"
_THEIRS = (r"DynamicCache, \1", r"StaticCache, \1", r"compiled StaticCache, \1")

GOALS: tuple[Goal, ...] = (
    Goal("step", rf"(?:full|{_H2O}), 1 x 4096", "ratio", most=1.3),
    Goal("step", rf"(?:full|{_H2O}), (?:16|48|64) x 8192", "ratio", most=1.4),
    Goal("step", rf"{_CODES}, (?:16|48|64) x 8192", "ratio", most=1.6),
    Goal("steady", _H2O, "tokens_per_s", least=3.0, over=("full",)),
    Goal("steady", _H2O, "tokens_per_s", least=1.6, over=("fp8",)),
    Goal("steady", rf"{_H2O}, 32768", "tokens_per_s", least=3.5, over=("full, 32768",)),
    Goal("served", r".*", "share_of_bound", least=0.85),
    Goal(
        "prompt",
        r"full, (\d+)",
        "first_token_s",
        most=1.0,
        over=(r"transformers sdpa, \1", r"transformers flash_attention_2, \1"),
        called="transformers with flash attention",
    ),
    Goal("prompt", rf"{_H2O}, (\d+)", "first_token_s", most=1.25, over=(r"full, \1",)),
    Goal("generate", rf"{_OWN}, (.*)", "tokens_per_s", least=1.0, over=_THEIRS, called="the fastest of theirs"),
    Goal("generate", rf"(?:full|{_H2O}), (16 x .*)", "tokens_per_s", least=2.0, over=(r"DynamicCache, \1",)),
    Goal(
        "offload",
        rf"(.*), {_H2O}(?:, int4)?, (\d+ \+ \d+)",
        "tokens_per_s",
        least=29.0,
        over=(r"\1, accelerate 4, \2", r"\1, accelerate 16, \2", r"\1, accelerate 4, \2, to its end"),
        called="Accelerate",
        once=True,
    ),
    Goal(
        "offload",
        rf"(.*), {_H2O}(?:, int4)?, (\d+ \+ \d+)",
        "tokens_per_s",
        least=3.0,
        over=(r"\1, full, \2", r"\1, full by FlexGen's search, \2"),
        called="the full cache",
        once=True,
    ),
    Goal("latency", rf"(30B.*), {_H2O}", "tokens_per_s", least=1.13, over=(r"\1, full",)),
    Goal("latency", rf"(6\.7B.*), {_H2O}", "tokens_per_s", least=1.86, over=(r"\1, full",)),
    Goal("storage", r"(?:encode|decode), .*", "gb_per_s", least=50.0),
)


def goals_of(section: str, cell: str) -> list[Goal]:
    """The goals of a cell, in their order."""
    return [goal for goal in GOALS if goal.section == section and re.fullmatch(goal.cell, cell)]


def goal_text(section: str, cell: str) -> str:
    """The goals of a cell in words; empty where it has none."""
    return "; ".join(goal.said(cell) for goal in goals_of(section, cell))


def verdicts(rows: Iterable[Row]) -> list[Verdict]:
    """What became of the goals of some rows of one card, in the order of `GOALS`.

    A goal without the rows that it needs is left out; of two rows of a cell the last one counts.
    """
    by_cell = {(row["section"], row["cell"]): row for row in rows}
    return [
        verdict
        for goal in GOALS
        for (section, cell), row in by_cell.items()
        if goal.section == section and re.fullmatch(goal.cell, cell)
        if (verdict := _verdict(goal, cell, row, by_cell)) is not None
    ]


def _verdict(goal: Goal, cell: str, row: Row, by_cell: dict[tuple[str, str], Row]) -> Verdict | None:
    value = row.get(goal.figure)
    if value is None:
        return None
    if goal.over:
        others = [by_cell.get((goal.section, other), {}).get(goal.figure) for other in goal.others(cell)]
        found = [other for other in others if other]
        if not found:
            return None
        value /= max(found) if goal.most is None else min(found)
    met = (goal.least is None or value >= goal.least) and (goal.most is None or value <= goal.most)
    return Verdict(goal, cell, float(value), met)


def verdict_text(verdict: Verdict) -> str:
    """A verdict in words: what was reached, of which goal."""
    return f"{verdict.goal.said(verdict.cell)}: {verdict.reached}, {verdict.word}"


def to_show(found: Sequence[Verdict]) -> list[Verdict]:
    """Verdicts without those of cells that come less near where one cell is enough."""
    best: dict[Goal, Verdict] = {}
    for verdict in found:
        if verdict.goal.once and (verdict.goal not in best or best[verdict.goal].value < verdict.value):
            best[verdict.goal] = verdict
    return [verdict for verdict in found if not verdict.goal.once or best[verdict.goal] is verdict]
