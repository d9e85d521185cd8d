"""Goodput of a layout: the highest rate at which nine of ten requests meet both service levels at once."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from millpond.errors import OptionError
from millpond_lab.cluster_plan.cache_size import CacheSize
from millpond_lab.cluster_plan.layout import ClusterLayout, Link
from millpond_lab.cluster_plan.profile import StepLoad
from millpond_lab.cluster_plan.requests import sample
from millpond_lab.cluster_plan.simulate import MissLimit, Simulation

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
