"""The choice of a default and of presets from rows of the board: on one half of the contexts, judged on the other.

A setting passes on a half if on every task of every model it keeps at least .97 of the full cache's score, the lower
end of the interval being at least .93. Of the settings that pass on the even contexts the one of the fewest bytes is
chosen; the odd contexts judge it, and are shown for every setting. Tasks count whose full cache scores at least .5. The
presets are three points of the same curve, each of fewer bytes than the one before: the fewest that keep .99, .95 and
.90 in the mean over tasks, on the even contexts; a point is left out where nothing smaller keeps that. Stored texts are
restored before anybody asks: their forms are chosen among themselves, by the same rule, on the tasks that they have
rows of.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from millpond_lab.evals.report.board import FULL, SOLVED, BoardRow, Setting, kept, mean_bytes
from millpond_lab.evals.report.leaderboard import markdown_table

#: Least share of the full cache's score that a default keeps on each task, and least lower end of its interval.
LEAST, LEAST_LOW = 0.97, 0.93
#: What the presets keep at least in the mean over tasks, the largest first.
PRESETS = {"light": 0.99, "balanced": 0.95, "tiny": 0.90}

Task = tuple[str, str]  #: model and family


@dataclass(frozen=True)
class Judged:
    """What a setting keeps on one half of the contexts: the least mean of all tasks, and the least lower end.

    Attributes:
        over_tasks: the mean over tasks of what is kept.
    """

    mean: float
    low: float
    task: Task
    over_tasks: float

    @property
    def passes(self) -> bool:
        """Whether it may be the default."""
        return self.mean >= LEAST and self.low >= LEAST_LOW


def scores_of(
    report: Mapping[str, Any], models: Sequence[str] | None
) -> tuple[dict[Setting, dict[Task, list[float]]], dict[Setting, float]]:
    """The score of each context by setting and task, and the mean share of bytes of each setting.

    Tasks are those of `models`, or of all, that the full cache solves.
    """
    scores: dict[Setting, dict[Task, list[float]]] = {}
    rows: dict[Setting, list[BoardRow]] = {}
    for model, own in report["models"].items():
        full = {row["family"]: row["scores"] for row in own["rows"] if Setting(*row["setting"]) == FULL}
        for row in own["rows"] if models is None or model in models else ():
            whole = full[row["family"]]
            if sum(whole) >= SOLVED * len(whole):
                setting = Setting(*row["setting"])
                scores.setdefault(setting, {})[model, row["family"]] = row["scores"]
                rows.setdefault(setting, []).append(row)
    return scores, {setting: mean_bytes(own) for setting, own in rows.items()}


def judged(own: dict[Task, list[float]], full: dict[Task, list[float]], half: int) -> Judged:
    """What a setting keeps on the even (0) or odd (1) contexts, on its worst task."""
    each = {task: kept(own[task][half::2], full[task][half::2]) for task in full}
    worst = min(each, key=lambda task: each[task][0])
    means = [mean for mean, _, _ in each.values()]
    return Judged(each[worst][0], min(low for _, low, _ in each.values()), worst, sum(means) / len(means))


def fewest(settings: Iterable[Setting], shares: Mapping[Setting, float]) -> Setting | None:
    """The setting of the fewest bytes; None if there is none."""
    return min(settings, key=lambda setting: shares[setting], default=None)


def points(first: Mapping[Setting, Judged], shares: Mapping[Setting, float]) -> dict[str, Setting | None]:
    """The presets, each of fewer bytes than those before it."""
    found: dict[str, Setting | None] = {}
    bound = float("inf")
    for name, least in PRESETS.items():
        enough = (setting for setting, own in first.items() if own.over_tasks >= least and shares[setting] < bound)
        point = found[name] = fewest(enough, shares)
        bound = bound if point is None else shares[point]
    return found


def form_of(setting: Setting) -> str:
    """Which choice a setting stands in: "live" or "stored"; "other" is a peer, or a format that no cache holds."""
    if setting.method.startswith(("turboquant", "kvpress/")):
        return "other"
    return "stored" if setting.method.startswith("stored") else "live"


def choose(report: Mapping[str, Any], models: Sequence[str] | None = None) -> dict[str, Any]:
    """The choice among live caches and, under "stored", among stored forms, with what each keeps on both halves."""
    scores, shares = scores_of(report, models)
    full = scores.get(FULL, {})
    forms: dict[str, dict[Setting, dict[Task, list[float]]]] = {"live": {}, "stored": {}, "other": {}}
    for setting, own in scores.items():
        if setting != FULL:
            forms[form_of(setting)][setting] = own
    stored_tasks = {task: own for task, own in full.items() if any(task in found for found in forms["stored"].values())}
    live, first = _choice(forms["live"], shares, full)
    stored, _ = _choice(forms["stored"], shares, stored_tasks)
    return {**live, "presets": points(first, shares), "stored": stored}


def _choice(
    scores: Mapping[Setting, dict[Task, list[float]]], shares: dict[Setting, float], full: dict[Task, list[float]]
) -> tuple[dict[str, Any], dict[Setting, Judged]]:
    """The choice among some settings by the tasks of `full`, and what each keeps where it is chosen."""
    complete = [
        setting
        for setting, own in scores.items()
        if full and all(len(own.get(task, ())) == len(whole) for task, whole in full.items())
    ]
    first, second = ({setting: judged(scores[setting], full, half) for setting in complete} for half in (0, 1))
    default = fewest((setting for setting, own in first.items() if own.passes), shares)
    found = {
        "tasks": [{"model": model, "family": family, "contexts": len(own)} for (model, family), own in full.items()],
        "default": default,
        "held": None if default is None else second[default].passes,
        "settings": [
            {"setting": setting, "bytes": shares[setting], "even": asdict(even), "odd": asdict(second[setting])}
            for setting, even in sorted(first.items(), key=lambda item: -shares[item[0]])
        ],
        "without rows of every task": [str(setting) for setting in scores if setting not in complete],
    }
    return found, first


def choice_table(data: Mapping[str, Any]) -> str:
    """The tables of all settings, with what was chosen."""
    head = (
        "# The default\n\nLeast share of the full cache's score that is kept, of all tasks, and the least lower end of "
        "the 95 % intervals; the task is the worst one. "
    )
    parts = [f"{head}{_tasks(data)}\n\n{_table(data)}"]
    if data["stored"]["settings"]:
        parts.append(f"Texts that are stored, and restored before anybody asks. {_tasks(data['stored'])}")
        parts.append(_table(data["stored"]))
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _tasks(data: Mapping[str, Any]) -> str:
    tasks = "; ".join(f"{one['family']} of {one['model']} ({one['contexts']} contexts)" for one in data["tasks"])
    return f"Tasks: {tasks}."


def _table(data: Mapping[str, Any]) -> str:
    names = {"**default**": data["default"], **data.get("presets", {})}
    lines = [
        (
            f"`{Setting(*row['setting'])}`",
            f"{row['bytes']:.1%}",
            *(f"{row[half]['mean']:.3f}, {row[half]['low']:.2f} ({row[half]['task'][1]})" for half in ("even", "odd")),
            " ".join(
                name
                for name, setting in names.items()
                if setting is not None and Setting(*setting) == Setting(*row["setting"])
            ),
        )
        for row in data["settings"]
    ]
    return markdown_table(("setting", "bytes of bf16", "kept where chosen", "kept where judged", "chosen as"), lines)
