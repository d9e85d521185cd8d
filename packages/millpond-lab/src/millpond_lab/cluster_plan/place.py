"""Layouts that fit a number of devices, compared by goodput per device, and plans that follow the load."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from millpond.cluster.replan import LoadShape
from millpond.errors import DataError, OptionError
from millpond_lab.cluster_plan.layout import (
    FREE_MOVES,
    STEP_TOKENS,
    CacheSize,
    ClusterLayout,
    Link,
    MoveTimes,
    WorkerPlan,
)
from millpond_lab.cluster_plan.profile import StepLoad, StepTimes
from millpond_lab.cluster_plan.simulate import MissLimit, Simulation, sample

#: Share of requests that must meet both levels.
ATTAINED = 0.9
#: The search ends when the rate is known to this share of itself.
FINE = 0.04
#: Times the first rate that is tried: far above it all requests of a simulation come at once, and no rate is too high.
MOST = 1000
#: A prompt is taken to need that many seconds at least: a fit to the steps of a busy machine may find 0.
LEAST_SECONDS = 1e-6


@dataclass(frozen=True, slots=True)
class ServiceLevels:
    """Seconds to the first token, and per token after it."""

    ttft: float
    tpot: float

    def __post_init__(self) -> None:
        if not (0 < self.ttft < float("inf") and 0 < self.tpot < float("inf")):
            raise OptionError(f"service levels ttft={self.ttft:g}, tpot={self.tpot:g} must be seconds above 0")


@dataclass(frozen=True, slots=True)
class Demand:
    """What is to be served.

    Attributes:
        lengths: (prompt, output) tokens of the requests of a trace. levels: to be met. requests: of one simulation.
        seeds: one simulation each, of other requests and arrivals.
    """

    lengths: Sequence[tuple[int, int]]
    levels: ServiceLevels
    requests: int = 1000
    seeds: Sequence[int] = (0, 1, 2)


@dataclass(frozen=True, slots=True)
class Goodput:
    """Requests per second of a layout, one number for each seed, and per device; and the bytes of a move.

    Attributes:
        at_least: the search ended before a rate was too high for one of the seeds: the true figure is this or more.
    """

    layout: ClusterLayout
    rates: tuple[float, ...]
    moved: float
    at_least: bool = False

    @property
    def per_device(self) -> float:
        """Mean over the seeds."""
        return statistics.fmean(self.rates) / self.layout.devices

    @property
    def interval(self) -> tuple[float, float]:
        """Lowest and highest of the seeds, per device."""
        return min(self.rates) / self.layout.devices, max(self.rates) / self.layout.devices


def goodput(
    layout: ClusterLayout, cache: CacheSize, link: Link, demand: Demand, report: Callable[[str], None] | None = None
) -> Goodput:
    """The goodput of a layout, by bisection for each seed. `report` is called before each simulation with its rate."""
    found: list[tuple[float, bool]] = []
    moves = [0.0]
    # of nine tenths that meet both levels, each of the others has missed one at least and two at most
    stop = MissLimit(demand.levels.ttft, demand.levels.tpot, math.ceil(2 * (1 - ATTAINED) * demand.requests))
    for seed in demand.seeds:

        def attained(rate: float, seed: int = seed) -> bool:
            if report is not None:
                report(f"{layout.name}: {rate:.2f} requests/s")
            outcomes = Simulation(layout, cache, link).run(sample(demand.lengths, demand.requests, rate, seed), stop)
            if outcomes is None:
                return False
            moves.append(statistics.fmean(outcome.moved for outcome in outcomes))
            met = sum(outcome.meets(demand.levels.ttft, demand.levels.tpot) for outcome in outcomes)
            return met >= ATTAINED * len(outcomes)

        found.append(_highest(attained, _likely(layout, demand)))
    return Goodput(layout, tuple(rate for rate, _ in found), max(moves), any(ended for _, ended in found))


def _likely(layout: ClusterLayout, demand: Demand) -> float:
    """A rate to begin with: half of what one reader could read if it did nothing else."""
    prompt = round(statistics.fmean(n for n, _ in demand.lengths))
    seconds = layout.workers[0].times.seconds(StepLoad(tokens=prompt, squares=prompt**2, ended=1))
    return 0.5 / max(seconds, LEAST_SECONDS)


def _highest(attained: Callable[[float], bool], likely: float) -> tuple[float, bool]:
    """The highest rate that is attained, to `FINE`; 0 where a thousandth of the likely one is not.

    And whether the search ended there, `MOST` times above the likely one: a higher one may be attained too.
    """
    low = high = likely
    if attained(likely):
        while attained(high := 2 * high):
            low = high
            if high > MOST * likely:
                return high, True
    else:
        while not attained(low := low / 2):
            high = low
            if low < likely / 1000:
                return 0.0, False
    while high - low > FINE * low:
        middle = (low + high) / 2
        low, high = (middle, high) if attained(middle) else (low, middle)
    return low, False


#: Layouts of each kind, with and without a split, that are simulated with every seed.
FINALISTS = 2


#: Most stages of a pipeline.
MAX_STAGES = 64


@dataclass(frozen=True, slots=True)
class Shape:
    """How the devices of a worker share a model.

    Attributes:
        shared: devices that share each layer, tp. stages: of a pipeline, pp.
    """

    shared: int
    stages: int = 1

    @property
    def devices(self) -> int:
        """Of all stages."""
        return self.shared * self.stages


@dataclass(frozen=True, slots=True)
class Devices:
    """What there is.

    Attributes:
        times: step times by the number of devices that share each layer. count: devices in all. per_node: of one node,
            among which caches move by the link. memory: bytes for the cache on each device; None: no limit.
            step_tokens: most tokens of a step that reads. moves: what a move occupies a worker for, whatever its
            devices. stages: numbers of stages of a pipeline that a worker may have.
    """

    times: Mapping[int, StepTimes]
    count: int
    per_node: int
    memory: int | None = None
    step_tokens: int = STEP_TOKENS
    moves: MoveTimes = FREE_MOVES
    stages: Sequence[int] = (1,)

    def __post_init__(self) -> None:
        if not self.times:
            raise OptionError("no step times: name a profile")
        if not self.stages or min(self.stages) < 1 or max(self.stages) > MAX_STAGES:
            raise OptionError(f"stages {list(self.stages)} of a pipeline: name numbers from 1 to {MAX_STAGES}")
        if self.count < 1 or self.per_node < 1:
            raise OptionError(f"{self.count} devices, {self.per_node} per node: both must be at least 1")
        if not list(self.shapes()):
            least = min(self.times) * min(self.stages)
            raise OptionError(
                f"a worker takes {least} devices at least; there are {self.count}, {self.per_node} per node"
            )

    def shapes(self) -> Iterator[Shape]:
        """All that a worker may have: a stage is in one node, and all stages are on the devices that there are."""
        for stages in sorted(set(self.stages)):
            for shared in sorted(self.times):
                if shared <= self.per_node and shared * stages <= self.count:
                    yield Shape(shared, stages)

    def worker(self, role: str, shape: Shape) -> WorkerPlan:
        """A worker of this shape."""
        memory = None if self.memory is None else self.memory * shape.devices
        return WorkerPlan(
            role,  # type: ignore[arg-type]
            self.times[shape.shared],
            shape.devices,
            memory,
            self.step_tokens,
            self.moves,
            shape.stages,
        )


def together(devices: Devices) -> Iterator[ClusterLayout]:
    """One worker that does both, for each shape that a worker may have."""
    for shape in devices.shapes():
        yield ClusterLayout((devices.worker("both", shape),))


def split_in_a_node(devices: Devices) -> Iterator[ClusterLayout]:
    """Algorithm 2: all numbers of workers of both roles, of all shapes with as many stages.

    A node has one stage of each worker, so that caches move inside of nodes.
    """
    for stages in sorted({shape.stages for shape in devices.shapes()}):
        room = min(devices.count // stages, devices.per_node)
        for p in sorted(devices.times):
            for d in sorted(devices.times):
                for readers in range(1, room // p + 1):
                    for decoders in range(1, (room - readers * p) // d + 1):
                        if math.gcd(readers, decoders) == 1:  # 2 + 2 is 1 + 1 twice, with more to choose from
                            yield _split(devices, Shape(p, stages), readers, Shape(d, stages), decoders)


def _split(devices: Devices, p: Shape, readers: int, d: Shape, decoders: int) -> ClusterLayout:
    return ClusterLayout((devices.worker("prefill", p),) * readers + (devices.worker("decode", d),) * decoders)


def split_anywhere(
    devices: Devices, cache: CacheSize, link: Link, demand: Demand, report: Callable[[str], None] | None = None
) -> ClusterLayout | None:
    """Algorithm 1: the best shape for each phase by itself, then as many workers of each as balance their rates.

    Returns:
        The layout; None where no worker meets a level alone or there are too few devices.
    """
    best: dict[str, tuple[Goodput, Shape]] = {}
    for role in ("prefill", "decode"):
        for shape in devices.shapes():
            found = _alone(devices, role, shape, cache, link, demand, report)
            rate = statistics.fmean(found.rates) / shape.devices
            if rate > 0 and (role not in best or rate > statistics.fmean(best[role][0].rates) / best[role][1].devices):
                best[role] = found, shape
    if len(best) < 2:
        return None
    rates = {role: statistics.fmean(found.rates) for role, (found, _) in best.items()}
    reads, decodes = best["prefill"][1], best["decode"][1]
    fits = []
    for readers in range(1, devices.count // reads.devices + 1):
        decoders = min(
            (devices.count - readers * reads.devices) // decodes.devices,
            math.ceil(readers * rates["prefill"] / rates["decode"]),
        )
        if decoders:
            rate = min(readers * rates["prefill"], decoders * rates["decode"])
            fits.append((rate / (readers * reads.devices + decoders * decodes.devices), readers, decoders))
    if not fits:
        return None
    _, readers, decoders = max(fits)
    return _split(devices, reads, readers, decodes, decoders)


def _alone(
    devices: Devices,
    role: str,
    shape: Shape,
    cache: CacheSize,
    link: Link,
    demand: Demand,
    report: Callable[[str], None] | None,
) -> Goodput:
    """Goodput of one worker of a role where the other phase takes no time and has no level to meet."""
    free = devices.times[shape.shared].scaled(1e-6)
    other = WorkerPlan("decode" if role == "prefill" else "prefill", free, shape.shared, None)
    own = devices.worker(role, shape)
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


Lengths = Sequence[tuple[int, int]]


def watch(
    read: Callable[[], Lengths],
    plan: Callable[[Lengths], None],
    wait: Callable[[], None],
    report: Callable[[str], None],
) -> None:
    """Plan, and plan again whenever the load has shifted; it ends by what `wait` raises.

    Args:
        read: the newest requests.
        plan: makes a plan for them.
        wait: returns when it is time to look again.
        report: gets a sentence before each new plan, and where the requests cannot be read at the moment.

    Raises:
        DataError: the requests cannot be read the first time.
    """
    lengths = read()
    plan(lengths)
    planned = LoadShape.of(lengths)
    while True:
        wait()
        try:
            lengths = read()
        except DataError as error:  # a line may be half written
            report(f"The last plan stays: {error}")
            continue
        newest = LoadShape.of(lengths)
        change = planned.shift(newest)
        if change is not None:
            report(change)
            plan(lengths)
            planned = newest
