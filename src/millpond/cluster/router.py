"""Choice of the worker that gets a request."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from millpond.cluster.worker import Role
from millpond.engine.outputs import EngineStats

#: Tokens of prompts that a request which decodes counts for: a step of a small model on a CPU takes about as long.
DECODING = 16


@dataclass(frozen=True, slots=True)
class Load:
    """What a worker has to do.

    Attributes:
        unread: tokens of prompts that it has to read. running: requests that it has, or that are on their way to it.
        stats: of its last report; None before it.
    """

    worker: str
    role: Role
    unread: int
    running: int
    stats: EngineStats | None

    @property
    def cost(self) -> int:
        """About how much must be done before a new request is served, in tokens that are read."""
        return self.unread + DECODING * self.running

    @property
    def room(self) -> float:
        """Share of its limit of bytes that is free; 1 where there is no limit."""
        stats = self.stats
        return 1.0 if stats is None or not stats.kv_limit else 1 - stats.kv_bytes / stats.kv_limit


def choose(loads: Iterable[Load], roles: frozenset[Role], n_bytes: int = 0) -> str | None:
    """The worker of one of these roles with the least to do, or with the most room where all have the same.

    Args:
        n_bytes: that the request takes at once; workers without room for them come last.

    Returns:
        Its name; None where there is none.
    """

    def fits(load: Load) -> bool:
        stats = load.stats
        return stats is None or not stats.kv_limit or stats.kv_bytes + n_bytes <= stats.kv_limit

    able = [load for load in loads if load.role in roles]
    best = min(able, key=lambda load: (not fits(load), load.cost, -load.room, load.worker), default=None)
    return None if best is None else best.worker
