"""The board: what settings of the cache keep of the full cache's answers, at which share of its bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from typing import Any, NamedTuple

import numpy as np

from millpond_lab.evals.report.leaderboard import markdown_table

#: Resamples of the contexts, and the seed that they are drawn by.
RESAMPLES, SEED = 4000, 7
#: Least score of the full cache on a task that counts.
SOLVED = 0.5


class Setting(NamedTuple):
    """Method with its options, budget ("" for none) and number format."""

    method: str
    budget: str = ""
    codec: str = "auto"

    def __str__(self) -> str:
        return " ".join(part for part in (self.method, self.budget, "" if self.codec == "auto" else self.codec) if part)


FULL = Setting("full")
#: A row of the board: setting, family, task, protocol, questions, failures, bytes, and the score of each context.
BoardRow = Mapping[str, Any]


def kept(scores: Sequence[float], full: Sequence[float], seed: int = SEED) -> tuple[float, float, float]:
    """The share of the full cache's score that a setting keeps, and its 95 % interval, over contexts; NaN of nothing.

    Example:
        >>> kept([0.5, 1.0], [1.0, 1.0])[0]
        0.75
    """
    own, whole = np.array(scores), np.array(full)
    if not whole.any():
        return float("nan"), float("nan"), float("nan")
    drawn = np.random.default_rng(seed).integers(len(own), size=(RESAMPLES, len(own)))
    sums = whole[drawn].sum(1)
    low, high = np.percentile(own[drawn].sum(1)[sums > 0] / sums[sums > 0], [2.5, 97.5])
    return float(own.sum() / whole.sum()), float(low), float(high)


def board_table(rows: Sequence[BoardRow]) -> str:
    """A table of one model's rows: what each setting keeps of the full cache's score on each task."""
    families = list(dict.fromkeys(row["family"] for row in rows))
    full = {row["family"]: row for row in rows if Setting(*row["setting"]) == FULL}
    lines = []
    for setting in dict.fromkeys(Setting(*row["setting"]) for row in rows):
        mine = {row["family"]: row for row in rows if Setting(*row["setting"]) == setting}
        cells = [_cell(mine.get(family), full.get(family)) for family in families]
        lines.append((mean_bytes(list(mine.values())), setting, cells))
    lines.sort(key=lambda line: -line[0])
    asked = {row["family"]: f"{row['questions']} on {len(row['scores'])}" for row in full.values()}
    heads = ("setting", "bytes of bf16", *(f"{family} ({asked.get(family, '')})" for family in families))
    return markdown_table(heads, [(f"`{setting}`", f"{share:.1%}", *cells) for share, setting, cells in lines])


def mean_bytes(rows: Sequence[BoardRow]) -> float:
    """The mean share of the bytes over rows."""
    return float(np.mean([row["bytes"] for row in rows]))


def _cell(row: BoardRow | None, whole: BoardRow | None) -> str:
    """The share kept with its interval; of fewer contexts than the full cache has, with their number."""
    if row is None or whole is None or len(row["scores"]) > len(whole["scores"]):
        return ""
    if row is whole:
        return f"score {np.mean(row['scores']):.2f}"
    n = len(row["scores"])
    mean, low, high = kept(row["scores"], whole["scores"][:n])
    fewer = "" if n == len(whole["scores"]) else f", {n} contexts"
    return f"{mean:.2f} ({low:.2f} to {high:.2f}{fewer})"


def board_page(report: Mapping[str, Any]) -> str:
    """A section for each model of the results of `benchmarks/quality/board.py`."""
    parts = [
        "# The board\n\nShares of the full cache's score that settings keep, and their 95 % intervals (bootstrap over "
        "contexts); in the heads, questions on contexts. No setting has seen a question when it compresses a context, "
        "except that `turns` asks one after another. Bytes: of a bf16 cache that keeps everything, where the first "
        "question begins."
    ]
    for name, own in report["models"].items():
        tasks = {row["family"]: f"{row['family']}: `{row['task']}`, {row['protocol']}" for row in own["rows"]}
        machine = own["machine"]
        note = (
            f"Computed in {own['dtype']} on {machine['cpu']}, seed {own['seed']}. Tasks: {'; '.join(tasks.values())}."
        )
        parts.append(f"## {name}\n\n{note}\n\n{board_table(own['rows'])}")
    return "\n\n".join(part.strip() for part in parts) + "\n"


def summary_table(report: Mapping[str, Any], names: Mapping[str, str]) -> str:
    """One table of all models: what each setting keeps on the tasks that the full cache solves, and on the worst.

    Settings are in it that have rows of every context of a task of each model; of how many tasks is said where it is
    not of all.

    Args:
        names: of the models, as their columns show them.
    """
    tasks = {name: _solved(report["models"][name]["rows"]) for name in names}
    settings = dict.fromkeys(Setting(*row["setting"]) for name in names for row in report["models"][name]["rows"])
    lines = []
    for setting in settings:
        own = {name: _complete(tasks[name], setting) for name in names}
        if all(own.values()):
            cells = [_least(tasks[name], own[name]) for name in names]
            lines.append((mean_bytes([row for rows in own.values() for row in rows]), setting, cells))
    lines.sort(key=lambda line: -line[0])
    heads = ("setting", "bytes", *(f"{shown}, {_count(tasks[name])}" for name, shown in names.items()))
    return markdown_table(heads, [(f"`{setting}`", f"{share:.0%}", *cells) for share, setting, cells in lines])


def _solved(rows: Sequence[BoardRow]) -> dict[str, dict[Setting, BoardRow]]:
    """The rows of each family that the full cache solves."""
    found: dict[str, dict[Setting, BoardRow]] = {}
    for row in rows:
        found.setdefault(row["family"], {})[Setting(*row["setting"])] = row
    return {family: own for family, own in found.items() if np.mean(own[FULL]["scores"]) >= SOLVED}


def _complete(tasks: Mapping[str, Mapping[Setting, BoardRow]], setting: Setting) -> list[BoardRow]:
    """The rows of a setting that have as many contexts as the full cache's."""
    rows = [own[setting] for own in tasks.values() if setting in own]
    return [row for row in rows if len(row["scores"]) == len(tasks[row["family"]][FULL]["scores"])]


def _count(tasks: Sized) -> str:
    return f"{len(tasks)} task{'s' * (len(tasks) > 1)}"


def _least(tasks: Mapping[str, Mapping[Setting, BoardRow]], rows: Sequence[BoardRow]) -> str:
    """The mean share that is kept over tasks, and the least with its interval."""
    if Setting(*rows[0]["setting"]) == FULL:
        return f"score {np.mean([np.mean(row['scores']) for row in rows]):.2f}"
    shares = {row["family"]: kept(row["scores"], tasks[row["family"]][FULL]["scores"]) for row in rows}
    worst = min(shares, key=lambda family: shares[family][0])
    mean, low, high = shares[worst]
    of = "" if len(rows) == len(tasks) else f", of {_count(rows)}"
    return (
        f"{np.mean([share for share, _, _ in shares.values()]):.2f}; {worst} {mean:.2f} ({low:.2f} to {high:.2f}){of}"
    )
