"""Requests of growing prompts over workers that hold blocks in LRU order: what a router makes of them. No engine."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from millpond.cluster.router import Load, PrefixLedger, RecentWork, choose
from millpond.engine.request import Request

BLOCK = 16


@dataclass
class SimulatedWorkers:
    """Workers with `blocks` blocks together, which read `rate` tokens of prompts in a unit of time.

    Attributes:
        hits: tokens that were held. read: tokens that each has read.
    """

    count: int
    blocks: int
    rate: float
    hits: int = 0
    read: list[int] = field(default_factory=list)

    def run(self, asks: Iterable[tuple[float, Request]], *, aware: bool = True) -> SimulatedWorkers:
        ledger, truth, recent = PrefixLedger(BLOCK), PrefixLedger(BLOCK), RecentWork()
        truth._secret = ledger._secret
        names = [f"replica-{n}" for n in range(self.count)]
        waiting, self.read, clock = dict.fromkeys(names, 0.0), [0] * self.count, 0.0
        for at, request in asks:
            waiting = {name: max(0.0, left - self.rate * (at - clock)) for name, left in waiting.items()}
            clock, keys = at, ledger.keys(request)
            ahead = recent.ahead(names)
            loads = [Load(name, "replica", int(waiting[name]), 0, None, ahead[name]) for name in names]
            spared = {name: ledger.hits(name, keys) for name in names} if aware else None
            name = choose(loads, frozenset({"replica"}), spared=spared)
            assert name is not None
            held = truth.hits(name, keys)
            cost = len(request.prompt) - held  # type: ignore[arg-type]
            self.hits += held
            self.read[names.index(name)] += cost
            waiting[name] += cost
            recent.note(name, cost)
            for book in (ledger, truth):
                book.note(name, keys)
            truth.trim(name, self.blocks // self.count)
            ledger.trim(name, len(truth._held[name]))  # as a worker reports
        return self

    @property
    def imbalance(self) -> float:
        """The most that a worker has read, over the mean."""
        return max(self.read) * self.count / sum(self.read)
