"""Figures of a cluster: its workers, and what it has moved and begun again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal

from millpond.cluster.settings import Role
from millpond.engine.outputs import EngineStats, PrefixStats

#: Where a worker is: it loads its model; it serves; it gives its requests to others and ends.
WorkerState = Literal["starting", "serving", "draining"]


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """One worker.

    Attributes:
        pid, node: id of its process, and of the machine in Ray; 0 and "" while it starts. stats: of its engine.
        requests: that it has. handoff_bytes: of requests that wait in it for another worker.
    """

    name: str
    role: Role
    pid: int
    node: str
    state: WorkerState
    stats: EngineStats | None
    requests: int = 0
    handoff_bytes: int = 0


@dataclass(frozen=True, slots=True)
class DrainResult:
    """What became of the requests of a worker that was drained.

    Attributes:
        moved: requests that went on elsewhere with their caches. replayed: those that were begun again there, since
            nothing of them was computed, or they could not move in time. seconds: until the worker had none.
    """

    worker: str
    moved: int
    replayed: int
    seconds: float


@dataclass(slots=True)
class ClusterFigures:
    """Counters from the start of a cluster.

    Attributes:
        moved: requests that went from one worker to another. moved_bytes: bytes that went with them.
        full_bytes: bytes of full caches of the same tokens. replayed: requests that were begun again.
        checkpoints: copies of caches that came to this process, for the case that a worker is lost. checkpoint_bytes:
            bytes of them. resumed: requests that went on from such a copy, and so are not among `replayed`.
        deaths: workers that ended, or did not answer. move_s: seconds from the offer of a request to its arrival,
            of all together.
    """

    moved: int = 0
    moved_bytes: int = 0
    full_bytes: int = 0
    replayed: int = 0
    deaths: int = 0
    move_s: float = 0.0
    checkpoints: int = 0
    checkpoint_bytes: int = 0
    resumed: int = 0


def together(stats: Sequence[EngineStats]) -> EngineStats:
    """All engines as one; no limit where one of them has none. They share no chunk store."""

    def of(name: str) -> int | None:
        found = [getattr(one, name) for one in stats]
        return None if None in found or (name == "kv_limit" and not found) else sum(found)

    numbers = {field.name: of(field.name) for field in fields(EngineStats) if field.name not in ("prefix", "chunks")}
    return EngineStats(**numbers, prefix=_prefixes([one.prefix for one in stats]))  # type: ignore[arg-type]


def _prefixes(found: Sequence[PrefixStats | None]) -> PrefixStats | None:
    """Prefix caches of one rule as one; None where there is none."""
    there = [one for one in found if one is not None]
    if not there:
        return None
    numbers = [field.name for field in fields(PrefixStats) if field.name != "rule"]
    return PrefixStats(there[0].rule, **{name: sum(getattr(one, name) for one in there) for name in numbers})
