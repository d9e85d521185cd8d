"""Figures of evictions: with a request's last output, in the engine's log, and for Prometheus."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from millpond_vllm.event_times import NEVER, EventTimes

#: Seconds between two lines of the log, as vLLM's own figures have.
EVERY_S = 10.0


@dataclass(slots=True)
class EvictionCounts:
    """Figures of evictions.

    Attributes:
        events: Events so far.
        freed: Blocks that they gave back, those that they packed into taken off.
        in_place: Events that packed into blocks of their own, because none was free.
    """

    events: int = 0
    freed: int = 0
    in_place: int = 0


def request_figures(times: EventTimes, counts: EvictionCounts, ignored: str | None) -> dict[str, Any] | None:
    """Return the figures of a request as its output carries them; None for one that keeps everything.

    Args:
        times: Its events.
        counts: What they did.
        ignored: Why its own settings could not be used; None if they were.
    """
    if times.packed >= NEVER and ignored is None:
        return None
    found = {
        "events": counts.events,
        "blocks_freed": counts.freed,
        "entries_kept": times.packed * times.block if counts.events else 0,
        "recent": times.recent,
        "packed_in_place": counts.in_place,
    }
    return found if ignored is None else {**found, "ignored": ignored}


@dataclass(slots=True)
class EngineTotals:
    """Figures of all requests of an engine.

    Attributes:
        evictions: Events of all requests.
        requests: Requests that ended and could evict.
        evicted: Those that did.
        ignored: Requests whose own settings could not be used.
    """

    evictions: EvictionCounts = field(default_factory=EvictionCounts)
    requests: int = 0
    evicted: int = 0
    ignored: int = 0

    def ended(self, times: EventTimes, counts: EvictionCounts, ignored: str | None) -> None:
        """Count a request that ended."""
        self.requests += times.packed < NEVER
        self.evicted += counts.events > 0
        self.ignored += ignored is not None

    def by_name(self) -> dict[str, int]:
        """Return the totals by the name of their counter, without "_total"."""
        return {
            "millpond_vllm_events": self.evictions.events,
            "millpond_vllm_blocks_freed": self.evictions.freed,
            "millpond_vllm_packed_in_place": self.evictions.in_place,
            "millpond_vllm_requests": self.requests,
            "millpond_vllm_requests_evicted": self.evicted,
            "millpond_vllm_requests_ignored": self.ignored,
        }


_HELP = {
    "millpond_vllm_events": "Evictions from the KV cache.",
    "millpond_vllm_blocks_freed": "Blocks that evictions gave back.",
    "millpond_vllm_packed_in_place": "Evictions that packed into blocks of their own, because none was free.",
    "millpond_vllm_requests": "Requests that ended and could evict.",
    "millpond_vllm_requests_evicted": "Requests that ended and did evict.",
    "millpond_vllm_requests_ignored": "Requests whose own settings could not be used.",
}


class FigureReporter:
    """Tells the totals of an engine to its log every ten seconds, and to Prometheus with each change.

    Args:
        totals: Totals that the scheduler counts.
        labels: Labels of the counters: `model_name` and `engine`.
        log: Writes a line.
        clock: Returns seconds.
    """

    def __init__(
        self,
        totals: EngineTotals,
        labels: dict[str, str],
        log: Callable[..., None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._totals = totals
        self._log, self._clock = log, clock
        self._last = clock()
        self._said: dict[str, int] = totals.by_name()
        self._told: dict[str, int] = totals.by_name()
        self._counters = {name: counter.labels(**labels) for name, counter in _counters().items()}

    def step(self) -> None:
        """Tell what changed; the log at most every ten seconds."""
        found = self._totals.by_name()
        if found != self._told:
            for name, counter in self._counters.items():
                counter.inc(found[name] - self._told[name])
            self._told = found
        if found != self._said and self._clock() - self._last >= EVERY_S:
            self.say()

    def say(self) -> None:
        """Write a line of the log, if anything happened since the last one."""
        found = self._totals.by_name()
        if found == self._said:
            return
        self._said, self._last = found, self._clock()
        totals = self._totals
        self._log(
            "Evictions: %d, blocks freed: %d, packed in place: %d, requests evicted: %d of %d, settings ignored: %d",
            totals.evictions.events,
            totals.evictions.freed,
            totals.evictions.in_place,
            totals.evicted,
            totals.requests,
            totals.ignored,
        )


def metric_labels(vllm_config: Any) -> dict[str, str]:
    """Return the labels that vLLM's own metrics of an engine have."""
    return {
        "model_name": str(vllm_config.model_config.served_model_name),
        "engine": str(vllm_config.parallel_config.data_parallel_rank),
    }


@cache
def _counters() -> dict[str, Any]:
    """Return the counters by name; one process has each once; none where Prometheus' client is not installed."""
    try:
        from prometheus_client import Counter
    except ImportError:
        return {}
    return {name: Counter(name, text, ("model_name", "engine")) for name, text in _HELP.items()}
