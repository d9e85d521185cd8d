"""The choice of a default and of presets from rows of the board: on one half of the contexts, judged on the other.

A setting passes on a half if on every task of every model it keeps at least .97 of the full cache's score, the lower
end of the interval being at least .93. Of the settings that pass on the even contexts the one of the fewest bytes is
chosen; the odd contexts judge it, and are shown for every setting. Tasks count whose full cache scores at least .5. The
presets are three points of the same curve: the fewest bytes that keep .99, .97 and .90 on the even contexts, by the
mean alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from millpond_lab.evals.report.board import FULL, BoardRow, Setting, kept, mean_bytes
from millpond_lab.evals.report.leaderboard import markdown_table

#: Least share of the full cache's score that a default keeps on each task, and least lower end of its interval.
LEAST, LEAST_LOW = 0.97, 0.93
#: Least score of the full cache on a task that counts.
SOLVED = 0.5
#: What the presets keep at least on each task, the largest first; the lower end counts for the default alone.
PRESETS = {"light": 0.99, "balanced": LEAST, "tiny": 0.90}

Task = tuple[str, str]  #: model and family


@dataclass(frozen=True)
class Judged:
    """What a setting keeps on one half of the contexts: the least mean of all tasks, and the least lower end."""

    mean: float
    low: float
    task: Task

    @property
    def passes(self) -> bool:
        """Whether it may be the default."""
        return self.mean >= LEAST and self.low >= LEAST_LOW


def scores_of(report: Mapping[str, Any]) -> tuple[dict[Setting, dict[Task, list[float]]], dict[Setting, float]]:
    """The score of each context by setting and task, and the share of bytes of each setting, its mean over tasks."""
    scores: dict[Setting, dict[Task, list[float]]] = {}
    rows: dict[Setting, list[BoardRow]] = {}
    for model, own in report["models"].items():
        for row in own["rows"]:
            setting = Setting(*row["setting"])
            scores.setdefault(setting, {})[model, row["family"]] = row["scores"]
            rows.setdefault(setting, []).append(row)
    return scores, {setting: mean_bytes(own) for setting, own in rows.items()}


def judged(own: dict[Task, list[float]], full: dict[Task, list[float]], half: int) -> Judged:
    """What a setting keeps on the even (0) or odd (1) contexts, on its worst task."""
    each = {task: kept(own[task][half::2], full[task][half::2]) for task in full}
    worst = min(each, key=lambda task: each[task][0])
    return Judged(each[worst][0], min(low for _, low, _ in each.values()), worst)


def chosen(first: dict[Setting, Judged], shares: dict[Setting, float], least: float, low: float) -> Setting | None:
    """The setting of the fewest bytes that keeps enough; None if none does."""
    enough = [setting for setting, found in first.items() if found.mean >= least and found.low >= low]
    return min(enough, key=lambda setting: shares[setting], default=None)


def choose(report: Mapping[str, Any], models: Sequence[str] | None = None) -> dict[str, Any]:
    """The choice, with what each setting keeps on both halves."""
    scores, shares = scores_of(report)
    full = {
        task: own
        for task, own in scores[FULL].items()
        if (models is None or task[0] in models) and sum(own) >= SOLVED * len(own)
    }
    complete = [
        setting
        for setting, own in scores.items()
        if setting != FULL and all(len(own.get(task, ())) == len(whole) for task, whole in full.items())
    ]
    halves = [{setting: judged(scores[setting], full, half) for setting in complete} for half in (0, 1)]
    default = chosen(halves[0], shares, LEAST, LEAST_LOW)
    return {
        "tasks": [{"model": model, "family": family, "contexts": len(own)} for (model, family), own in full.items()],
        "default": default,
        "held": None if default is None else halves[1][default].passes,
        "presets": {name: chosen(halves[0], shares, least, -1.0) for name, least in PRESETS.items()},
        "settings": [
            {"setting": setting, "bytes": shares[setting], "even": asdict(even), "odd": asdict(halves[1][setting])}
            for setting, even in sorted(halves[0].items(), key=lambda item: -shares[item[0]])
        ],
        "without rows of every task": [str(setting) for setting in scores if setting not in (FULL, *complete)],
    }


def choice_table(data: Mapping[str, Any]) -> str:
    """The table of all settings, with what was chosen."""
    lines = [
        (
            f"`{Setting(*row['setting'])}`",
            f"{row['bytes']:.1%}",
            *(f"{row[half]['mean']:.3f}, {row[half]['low']:.2f} ({row[half]['task'][1]})" for half in ("even", "odd")),
            " ".join(
                name
                for name, setting in {"**default**": data["default"], **data["presets"]}.items()
                if setting is not None and Setting(*setting) == Setting(*row["setting"])
            ),
        )
        for row in data["settings"]
    ]
    heads = ("setting", "bytes of bf16", "kept where chosen", "kept where judged", "chosen as")
    tasks = "; ".join(f"{one['family']} of {one['model']} ({one['contexts']} contexts)" for one in data["tasks"])
    return (
        "# The default\n\nLeast share of the full cache's score that is kept, of all tasks, and the least lower end of "
        f"the 95 % intervals; the task is the worst one. Tasks: {tasks}.\n\n{markdown_table(heads, lines)}"
    )
