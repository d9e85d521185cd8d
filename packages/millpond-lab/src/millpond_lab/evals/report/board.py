"""The board: what settings of the cache keep of the full cache's answers, at which share of its bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from millpond.budget import Budget
from millpond.codec import resolve
from millpond.errors import BudgetError
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

    @classmethod
    def parse(cls, text: str) -> Setting:
        """The setting that a row of the board is named by.

        Raises:
            OptionError: what stands behind the method is no budget, no format, and no budget with a format behind it.

        Example:
            >>> Setting.parse("ada 20%, at least 512 rotated4")
            Setting(method='ada', budget='20%, at least 512', codec='rotated4')
            >>> Setting.parse("full int8")
            Setting(method='full', budget='', codec='int8')
        """
        method, *rest = text.split()
        if rest and not _is_budget(" ".join(rest)):
            *rest, codec = rest
            resolve(codec)
        else:
            codec = "auto"
        if rest:
            Budget.parse(" ".join(rest))
        return cls(method, " ".join(rest), codec)


def _is_budget(text: str) -> bool:
    try:
        Budget.parse(text)
    except BudgetError:
        return False
    return True


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


def board_page(report: Mapping[str, Any], picture: str = "") -> str:
    """A section for each model of the results of `benchmarks/quality/board.py`, below what shows a picture."""
    parts = [
        f"# The board\n\n{picture}",
        "Shares of the full cache's score that settings keep, and their 95 % intervals (bootstrap over "
        "contexts); in the heads, questions on contexts. No setting has seen a question when it compresses a context, "
        "except that `turns` asks one after another. Bytes: of a bf16 cache that keeps everything, where the first "
        "question begins.",
    ]
    for name, own in report["models"].items():
        tasks = {row["family"]: f"{row['family']}: `{row['task']}`, {row['protocol']}" for row in own["rows"]}
        machines = "; ".join([own["machine"]["cpu"], *_elsewhere(own["rows"])])
        note = f"Computed in {own['dtype']} on {machines}; seed {own['seed']}. Tasks: {'; '.join(tasks.values())}."
        parts.append(f"## {name}\n\n{note}\n\n{board_table(own['rows'])}")
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _elsewhere(rows: Sequence[BoardRow]) -> list[str]:
    """Settings whose rows were computed on another processor than the model's others, each with it."""
    found: dict[str, list[str]] = {}
    for row in rows:
        if "cpu" in row:
            found.setdefault(row["cpu"], []).append(f"`{Setting(*row['setting'])}` on {row['family']}")
    return [f"{', '.join(settings)} on {cpu}" for cpu, settings in found.items()]
