"""The verdict on layouts: whether to read prompts apart from answers, and why or why not."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from millpond.cache.atomic_files import publish, write_part
from millpond.cluster.layout_file import FORMAT
from millpond.errors import OptionError
from millpond_lab.cluster_plan.layout import CacheSize, Link
from millpond_lab.cluster_plan.place import Demand, Goodput, goodput

#: A layout counts as ahead only if its goodput per device is above the other's by this share, and outside its seeds.
AHEAD = 0.05


@dataclass(frozen=True, slots=True)
class Verdict:
    """The recommended layout, and sentences that say why.

    Attributes:
        best: the row that is recommended. split: whether it reads prompts apart from answers. reasons: sentences.
    """

    best: Goodput
    split: bool
    reasons: tuple[str, ...]


def judge(rows: Sequence[Goodput], cache: CacheSize, link: Link, demand: Demand) -> Verdict:
    """Choose between the best layout in which every worker does both, and the best one that splits.

    Where splitting is not ahead it is simulated once more with moves that take no time on the way, and
    with ones that occupy no worker either, to tell what holds it back.
    """
    both = max((row for row in rows if not row.layout.splits), key=lambda row: row.per_device)
    split = max((row for row in rows if row.layout.splits), key=lambda row: row.per_device, default=None)
    if split is None:
        return Verdict(both, False, ("Too few devices to split.",))
    moved = f"a request moves {split.moved / 1e6:,.1f} MB"
    reasons = [
        f"Best without a split: {both.layout.name}, {_rate(both)}.",
        f"Best with one: {split.layout.name}, {_rate(split)}; {moved}.",
    ]
    reasons += [
        f"{row.layout.name} met both levels at every rate that was tried: its goodput is at least that, and not known."
        for row in (both, split)
        if row.at_least
    ]
    if both.per_device == split.per_device == 0:
        reasons.append(
            "No layout meets both service levels, however few the requests: the levels are below what a "
            "request takes alone; relax them, or give a worker more devices."
        )
        return Verdict(both, False, tuple(reasons))
    if _ahead(split, both):
        ratio = f"{split.per_device / both.per_device:.2f} times" if both.per_device else "what it cannot do at all"
        reasons.append(f"Split: {ratio} per device, outside the range of the seeds.")
        return Verdict(split, True, tuple(reasons))
    instant = replace(link, bytes_per_s=float("inf"), latency_s=0.0)
    free = goodput(split.layout, cache, instant, demand)
    idle = goodput(split.layout.with_free_moves(), cache, instant, demand) if split.layout.moves_cost else free
    if _ahead(free, split):
        reasons.append(
            f"Do not split: moving the caches holds it back ({_rate(free)} if moves took no time); a faster link, a "
            "smaller budget or fewer bits per number would change that."
        )
    elif _ahead(idle, split):
        reasons.append(
            f"Do not split: packing caches and taking them in holds it back ({_rate(idle)} if moves took no time); a "
            "faster link would not change that, a smaller budget or fewer bits per number may."
        )
    else:
        reasons.append(
            "Do not split: prompts and answers disturb each other less than devices are lost by giving each phase its "
            "own; moves do not matter."
        )
    return Verdict(both, False, tuple(reasons))


def to_json(rows: Sequence[Goodput], verdict: Verdict, devices: int = 1) -> dict[str, Any]:
    """The comparison as plain data, which `load_plan` reads: the recommended workers, why, and all rows.

    Args:
        devices: that there are, which hold the workers one or more times.
    """
    return {
        "format": FORMAT,
        "copies": max(1, devices // verdict.best.layout.devices),
        "workers": [
            {"role": worker.role, "devices": worker.devices} | ({"stages": worker.stages} if worker.stages > 1 else {})
            for worker in verdict.best.layout.workers
        ],
        "split": verdict.split,
        "reasons": list(verdict.reasons),
        "rows": [
            {
                "layout": row.layout.name,
                "devices": row.layout.devices,
                "goodput_per_device": row.per_device,
                "lowest": row.interval[0],
                "highest": row.interval[1],
                "at_least": row.at_least,
                "moved_bytes": row.moved,
            }
            for row in rows
        ],
    }


def save_plan(path: Path, rows: Sequence[Goodput], verdict: Verdict, devices: int = 1) -> None:
    """Write `to_json` whole under another name and rename it, since a plan may be read while a new one is made.

    Raises:
        OptionError: the file cannot be written.
    """
    data = json.dumps(to_json(rows, verdict, devices), indent=1) + "\n"
    try:
        publish(write_part(path, data.encode()), path)
    except OSError as error:
        raise OptionError(f"{path} cannot be written: {error.strerror}; name a folder that is there") from None


def _ahead(one: Goodput, other: Goodput) -> bool:
    """Whether one is surely ahead; of a figure that is only known to be at least so much, nothing is."""
    more = one.per_device > (1 + AHEAD) * other.per_device
    return more and one.interval[0] > other.interval[1] and not other.at_least


def _rate(row: Goodput) -> str:
    low, high = row.interval
    more = "at least " if row.at_least else ""
    return f"{more}{row.per_device:.2f} requests/s per device ({low:.2f} to {high:.2f} over the seeds)"
