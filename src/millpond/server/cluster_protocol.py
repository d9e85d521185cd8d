"""Protocol of an engine that consists of several workers; `millpond.cluster.AsyncLLM` has it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from millpond.engine.outputs import EngineStats
from millpond.server.llm_protocol import ServedLLM


class ServedWorker(Protocol):
    """One worker: see `millpond.cluster.figures.WorkerInfo`."""

    @property
    def name(self) -> str: ...

    @property
    def role(self) -> str: ...

    @property
    def pid(self) -> int: ...

    @property
    def node(self) -> str: ...

    @property
    def state(self) -> str: ...

    @property
    def requests(self) -> int: ...

    @property
    def handoff_bytes(self) -> int: ...

    @property
    def stats(self) -> EngineStats | None: ...


class MoveCounters(Protocol):
    """Counters of a cluster: see `millpond.cluster.figures.ClusterFigures`."""

    @property
    def moved(self) -> int: ...

    @property
    def moved_bytes(self) -> int: ...

    @property
    def full_bytes(self) -> int: ...

    @property
    def replayed(self) -> int: ...

    @property
    def deaths(self) -> int: ...

    @property
    def move_s(self) -> float: ...

    @property
    def checkpoints(self) -> int: ...

    @property
    def checkpoint_bytes(self) -> int: ...

    @property
    def resumed(self) -> int: ...


class DrainReport(Protocol):
    """The end of a drain: see `millpond.cluster.figures.DrainResult`."""

    @property
    def worker(self) -> str: ...

    @property
    def moved(self) -> int: ...

    @property
    def replayed(self) -> int: ...

    @property
    def seconds(self) -> float: ...


@runtime_checkable
class ServedCluster(ServedLLM, Protocol):
    """A `ServedLLM` of several workers."""

    def workers(self) -> Sequence[ServedWorker]:
        """All workers."""
        ...

    def live(self) -> Mapping[str, int]:
        """Numbers of workers that take new requests, by role; 0 where there is none."""
        ...

    def figures(self) -> MoveCounters:
        """What was moved, replayed and lost."""
        ...

    async def drain(self, worker: str, *, replace: bool = True) -> DrainReport:
        """Give the requests of a worker to others, and end it.

        Raises:
            OptionError: there is no such worker, or none of its role would be left.
        """
        ...
