"""The board in short: what each setting keeps on the tasks that a model solves, in the mean and on the worst one."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from millpond_lab.evals.report.board import FULL, SOLVED, BoardRow, Setting, kept, mean_bytes
from millpond_lab.evals.report.leaderboard import markdown_table


@dataclass(frozen=True, slots=True)
class Kept:
    """What a setting keeps of the full cache's answers of one model.

    Attributes:
        mean: over tasks; of the full cache the mean score. worst: the task of which least is kept. least, low, high:
            the share kept there, and its 95 % interval. tasks: of which there are rows. contexts: of the worst task, if
            they are fewer than the full cache has; 0 for all.
    """

    mean: float
    worst: str
    least: float
    low: float
    high: float
    tasks: int
    contexts: int = 0


@dataclass(frozen=True, slots=True)
class Line:
    """A setting, its mean share of the bytes, and what it keeps of the answers of each model that has rows."""

    setting: Setting
    bytes: float
    models: dict[str, Kept]


@dataclass(frozen=True, slots=True)
class Summary:
    """Lines from the most bytes to the fewest, and how many tasks each model solves."""

    lines: list[Line]
    tasks: dict[str, int]


def summary(report: Mapping[str, Any], models: Sequence[str], few: Collection[Setting] = ()) -> Summary:
    """The settings that have rows of every context of a task of each model.

    Args:
        few: settings that may have fewer contexts, or rows of some models alone.
    """
    tasks = {name: _solved(report["models"][name]["rows"]) for name in models}
    lines = []
    for setting in dict.fromkeys(Setting(*row["setting"]) for name in models for row in report["models"][name]["rows"]):
        rows = {name: _rows(tasks[name], setting, setting not in few) for name in models}
        rows = {name: own for name, own in rows.items() if own}
        if len(rows) == len(models) or (rows and setting in few):
            share = mean_bytes([row for own in rows.values() for row in own])
            lines.append(Line(setting, share, {name: _kept(tasks[name], own) for name, own in rows.items()}))
    lines.sort(key=lambda line: -line.bytes)
    return Summary(lines, {name: len(own) for name, own in tasks.items()})


def _solved(rows: Sequence[BoardRow]) -> dict[str, dict[Setting, BoardRow]]:
    """The rows of each family that the full cache solves."""
    found: dict[str, dict[Setting, BoardRow]] = {}
    for row in rows:
        found.setdefault(row["family"], {})[Setting(*row["setting"])] = row
    return {family: own for family, own in found.items() if np.mean(own[FULL]["scores"]) >= SOLVED}


def _rows(tasks: Mapping[str, Mapping[Setting, BoardRow]], setting: Setting, complete: bool) -> list[BoardRow]:
    """The rows of a setting; if `complete`, those that have as many contexts as the full cache's."""
    rows = [own[setting] for own in tasks.values() if setting in own]
    return [row for row in rows if not complete or len(row["scores"]) == len(tasks[row["family"]][FULL]["scores"])]


def _kept(tasks: Mapping[str, Mapping[Setting, BoardRow]], rows: Sequence[BoardRow]) -> Kept:
    own = {row["family"]: row["scores"] for row in rows}
    full = {family: tasks[family][FULL]["scores"] for family in own}
    shares = {family: kept(scores, full[family][: len(scores)]) for family, scores in own.items()}
    worst = min(shares, key=lambda family: shares[family][0])
    mean = np.mean([share for share, _, _ in shares.values()])
    if Setting(*rows[0]["setting"]) == FULL:
        mean = np.mean([np.mean(row["scores"]) for row in rows])
    contexts = len(own[worst]) if len(own[worst]) < len(full[worst]) else 0
    return Kept(float(mean), worst, *shares[worst], len(rows), contexts)


def summary_table(found: Summary, names: Mapping[str, str]) -> str:
    """One table of all models.

    Args:
        names: of the models, as their columns show them.
    """
    heads = ("setting", "bytes", *(f"{shown}, {task_count(found.tasks[name])}" for name, shown in names.items()))
    lines = [
        (f"`{line.setting}`", f"{line.bytes:.0%}", *(_cell(line, name, found.tasks[name]) for name in names))
        for line in found.lines
    ]
    return markdown_table(heads, lines)


def _cell(line: Line, name: str, tasks: int) -> str:
    """What a setting keeps of a model's answers: the mean and the worst task, or the one task of several."""
    own = line.models.get(name)
    if own is None:
        return ""
    if line.setting == FULL:
        return f"score {own.mean:.2f}"
    few = "" if not own.contexts else f", {own.contexts} contexts"
    worst = f"{own.worst} {own.least:.2f} ({own.low:.2f} to {own.high:.2f}{few})"
    if own.tasks == 1 < tasks:
        return worst
    of = "" if own.tasks == tasks else f", of {task_count(own.tasks)}"
    return f"{own.mean:.2f}; {worst}{of}"


def task_count(tasks: int) -> str:
    """How many tasks, in words."""
    return f"{tasks} task{'s' * (tasks > 1)}"
