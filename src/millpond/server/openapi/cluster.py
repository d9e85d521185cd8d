"""Answers of the routes about workers, which a server over several of them has."""

from __future__ import annotations

from millpond.server.openapi.base import Described


class ClusterWorker(Described):
    """A worker; numbers of its engine are missing while it starts."""

    name: str
    role: str
    pid: int
    node: str
    state: str
    requests: int
    handoff_bytes: int
    running: int | None = None
    waiting: int | None = None
    swapped: int | None = None
    kv_bytes: int | None = None
    kv_reserved: int | None = None
    kv_limit: int | None = None
    prompt_tokens: int | None = None
    generated_tokens: int | None = None


class ClusterWorkers(Described):
    """All workers, and what was moved, copied, replayed and lost so far."""

    workers: list[ClusterWorker]
    moved: int
    moved_bytes: int
    full_bytes: int
    replayed: int
    deaths: int
    move_s: float
    checkpoints: int
    checkpoint_bytes: int
    resumed: int


class WorkerDrained(Described):
    """A worker that has ended, and what became of its requests."""

    worker: str
    moved: int
    replayed: int
    seconds: float
