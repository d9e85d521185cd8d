"""Figures of a cluster: its workers, its moved and restarted requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal

from millpond.engine.outputs import EngineStats, PrefixStats

#: Who reads prompts and decodes ("replica"), or only one of the two.
Role = Literal["replica", "prefill", "decode"]
#: Where a worker is: it loads its model; it serves; it gives its requests to others and ends.
WorkerState = Literal["starting", "serving", "draining"]


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """One worker.

    Attributes:
        name: Its name.
        role: Its role.
        pid: Id of its process; 0 while it starts.
        node: Id of its machine in Ray; "" while it starts.
        state: Whether it starts, serves or is being drained.
        stats: Statistics of its engine.
        requests: Requests that it has.
        handoff_bytes: Bytes of requests that wait in it for another worker.
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
    """Result of draining a worker.

    Attributes:
        worker: Its name.
        moved: Requests that continued elsewhere with their caches.
        replayed: Requests that were restarted elsewhere, since nothing of them was computed, or they could not move in
            time.
        seconds: Seconds until the worker had none.
    """

    worker: str
    moved: int
    replayed: int
    seconds: float


@dataclass(slots=True)
class ClusterFigures:
    """Counters from the start of a cluster.

    Attributes:
        moved: Requests that went from one worker to another.
        moved_bytes: Bytes that went with them.
        full_bytes: Bytes of full caches of the same tokens.
        replayed: Requests that were restarted.
        checkpoints: Copies of caches that came to this process, in case a worker is lost.
        checkpoint_bytes: Bytes of them.
        resumed: Requests that continued from such a copy, and so are not among `replayed`.
        deaths: Workers that ended, or did not answer.
        move_s: Seconds from the offer of a request to its arrival, of all together.
        role_changes: Workers that were restarted in another role.
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
    role_changes: int = 0


def together(stats: Sequence[EngineStats]) -> EngineStats:
    """Return all engines as one; no limit where one has none. They share no chunk store."""

    def of(name: str) -> int | None:
        values = [getattr(one, name) for one in stats]
        return None if None in values or (name == "kv_limit" and not values) else sum(values)

    numbers = {field.name: of(field.name) for field in fields(EngineStats) if field.name not in ("prefix", "chunks")}
    return EngineStats(**numbers, prefix=_prefixes([one.prefix for one in stats]))  # type: ignore[arg-type]


def _prefixes(parts: Sequence[PrefixStats | None]) -> PrefixStats | None:
    """Return prefix caches of one rule as one; None if there is none."""
    present = [one for one in parts if one is not None]
    if not present:
        return None
    first = present[0]
    numbers = [field.name for field in fields(PrefixStats) if field.name not in ("rule", "storage_codec")]
    sums = {name: sum(getattr(one, name) for one in present) for name in numbers}
    return PrefixStats(first.rule, storage_codec=first.storage_codec, **sums)
