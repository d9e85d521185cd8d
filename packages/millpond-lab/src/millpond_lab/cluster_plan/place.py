"""Layouts that fit a number of devices, compared by goodput per device: together, or prompts apart from answers.

Source: DistServe, arXiv:2401.09670, algorithms 1 (a fast link between all devices: each phase is placed by itself) and
2 (a fast link inside a node only: workers that pass caches to each other lie in one node). Ours differs in that
layouts in which every worker does both take part, and that moves are simulated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from millpond.errors import OptionError
from millpond_lab.cluster_plan.cache_size import CacheSize
from millpond_lab.cluster_plan.goodput import Demand, Goodput, ServiceLevels, goodput
from millpond_lab.cluster_plan.layout import STEP_TOKENS, ClusterLayout, Link, WorkerPlan
from millpond_lab.cluster_plan.move_times import FREE_MOVES, MoveTimes
from millpond_lab.cluster_plan.profile import StepTimes

#: Layouts of each kind, with and without a split, that are simulated with every seed.
FINALISTS = 2


@dataclass(frozen=True, slots=True)
class Devices:
    """What there is.

    Attributes:
        times: step times by the number of devices of one worker. count: devices in all. per_node: of one node, among
            which caches move by the link. memory: bytes for the cache on each device; None: no limit. step_tokens: most
            tokens of a step that reads. moves: what a move occupies a worker for, whatever its devices.
    """

    times: Mapping[int, StepTimes]
    count: int
    per_node: int
    memory: int | None = None
    step_tokens: int = STEP_TOKENS
    moves: MoveTimes = FREE_MOVES

    def __post_init__(self) -> None:
        if not self.times:
            raise OptionError("no step times: name a profile")
        if self.count < 1 or self.per_node < 1:
            raise OptionError(f"{self.count} devices, {self.per_node} per node: both must be at least 1")
        if min(self.times) > min(self.count, self.per_node):
            raise OptionError(
                f"a worker takes {min(self.times)} devices at least; there are {self.count}, {self.per_node} per node"
            )

    def worker(self, role: str, devices: int) -> WorkerPlan:
        """A worker of `devices` devices."""
        memory = None if self.memory is None else self.memory * devices
        return WorkerPlan(
            role,  # type: ignore[arg-type]
            self.times[devices],
            devices,
            memory,
            self.step_tokens,
            self.moves,
        )


def together(devices: Devices) -> Iterator[ClusterLayout]:
    """One worker that does both, for each number of devices that a worker may have."""
    for n in sorted(devices.times):
        if n <= min(devices.count, devices.per_node):
            yield ClusterLayout((devices.worker("both", n),))


def split_in_a_node(devices: Devices) -> Iterator[ClusterLayout]:
    """Algorithm 2: all numbers of workers of both roles that fit one node, of each size."""
    room = min(devices.count, devices.per_node)
    for p in sorted(devices.times):
        for d in sorted(devices.times):
            for readers in range(1, room // p + 1):
                for decoders in range(1, (room - readers * p) // d + 1):
                    if math.gcd(readers, decoders) == 1:  # 2 + 2 is 1 + 1 twice, with more to choose from
                        yield _split(devices, p, readers, d, decoders)


def _split(devices: Devices, p: int, readers: int, d: int, decoders: int) -> ClusterLayout:
    return ClusterLayout((devices.worker("prefill", p),) * readers + (devices.worker("decode", d),) * decoders)


def split_anywhere(
    devices: Devices, cache: CacheSize, link: Link, demand: Demand, report: Callable[[str], None] | None = None
) -> ClusterLayout | None:
    """Algorithm 1: the best worker for each phase by itself, then as many of each as balance their rates.

    Returns:
        The layout; None where no worker meets a level alone or there are too few devices.
    """
    best: dict[str, Goodput] = {}
    for role in ("prefill", "decode"):
        for n in sorted(devices.times):
            found = _alone(devices, role, n, cache, link, demand, report)
            if found.per_device > 0 and (role not in best or found.per_device > best[role].per_device):
                best[role] = found
    if len(best) < 2:
        return None
    rates = {role: sum(found.rates) / len(found.rates) for role, found in best.items()}
    sizes = {role: found.layout.workers[0 if role == "prefill" else -1].devices for role, found in best.items()}
    fits = []
    for readers in range(1, devices.count // sizes["prefill"] + 1):
        decoders = min(
            (devices.count - readers * sizes["prefill"]) // sizes["decode"],
            math.ceil(readers * rates["prefill"] / rates["decode"]),
        )
        if decoders:
            rate = min(readers * rates["prefill"], decoders * rates["decode"])
            used = readers * sizes["prefill"] + decoders * sizes["decode"]
            fits.append((rate / used, readers, decoders))
    if not fits:
        return None
    _, readers, decoders = max(fits)
    return _split(devices, sizes["prefill"], readers, sizes["decode"], decoders)


def _alone(
    devices: Devices,
    role: str,
    n: int,
    cache: CacheSize,
    link: Link,
    demand: Demand,
    report: Callable[[str], None] | None,
) -> Goodput:
    """Goodput of one worker of a role where the other phase takes no time and has no level to meet."""
    free = devices.times[n].scaled(1e-6)
    other = WorkerPlan("decode" if role == "prefill" else "prefill", free, n, None)
    own = devices.worker(role, n)
    levels = demand.levels
    levels = ServiceLevels(levels.ttft, 1e9) if role == "prefill" else ServiceLevels(1e9, levels.tpot)
    layout = ClusterLayout((own, other) if role == "prefill" else (other, own))
    asked = Demand(demand.lengths, levels, demand.requests, demand.seeds)
    return goodput(layout, cache, link, asked, report)


def compare(
    devices: Devices,
    cache: CacheSize,
    link: Link,
    demand: Demand,
    *,
    anywhere: bool = False,
    report: Callable[[str], None] | None = None,
) -> list[Goodput]:
    """Goodput of every layout that fits, the best per device first.

    All are simulated with the first seed, the best of each kind with all of them.

    Args:
        anywhere: caches move as fast between nodes as inside one, so algorithm 1 takes the place of 2.
    """
    layouts: Sequence[ClusterLayout] = list(together(devices))
    if anywhere:
        found = split_anywhere(devices, cache, link, demand, report)
        layouts = [*layouts, *([] if found is None else [found])]
    else:
        layouts = [*layouts, *split_in_a_node(devices)]
    once = replace(demand, seeds=demand.seeds[:1])
    rows = [goodput(layout, cache, link, once, report) for layout in layouts]
    rows.sort(key=lambda row: -row.per_device)
    for split in (False, True):  # the other seeds decide between those that may be best
        few = [n for n, row in enumerate(rows) if row.layout.splits is split][:FINALISTS]
        for n in few:
            rows[n] = goodput(rows[n].layout, cache, link, demand, report)
    return sorted(rows, key=lambda row: -row.per_device)
