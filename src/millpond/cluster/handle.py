"""Protocol of a worker as the dispatcher sees it, in another process or in this one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, TypeVar, TypeVarTuple

from millpond.cluster.messages import StartMessage, WorkerReport
from millpond.engine.async_llm import AsyncLLM
from millpond.engine.cluster_figures import Role
from millpond.engine.outputs import CacheSnapshot
from millpond.engine.request import CacheOptions, Request
from millpond.errors import MillpondError

T = TypeVar("T")
Args = TypeVarTuple("Args")


class WorkerLostError(MillpondError):
    """A worker's process has ended, or does not answer."""


class WorkerHandle(Protocol):
    """One worker; calls raise `WorkerLostError` where it is gone, else as `EngineWorker`.

    Attributes:
        name: Name of the worker.
        role: Role of the worker.
        pid: Id of its process; known after `open`.
        node: Id of its machine; known after `open`.
    """

    name: str
    role: Role
    pid: int
    node: str

    async def open(self) -> tuple[int, int, CacheOptions, str | None]:
        """Begin; return context length, vocabulary, cache options, and mark of codes.

        See `EngineWorker.open`.
        """
        ...

    async def start(self, starts: Sequence[StartMessage]) -> None:
        """See `EngineWorker.start`."""
        ...

    async def report(self, wanted: frozenset[str]) -> WorkerReport:
        """See `EngineWorker.report`; a worker that does not answer in time is lost."""
        ...

    async def offer(self, name: str) -> int | None:
        """See `EngineWorker.offer`."""
        ...

    async def cancel(self, name: str) -> None:
        """See `EngineWorker.cancel`."""
        ...

    def offered(self, name: str) -> Any:
        """Return a source of an offered request's bytes, for `take` of another worker."""
        ...

    async def take(self, name: str, offered: Any) -> None:
        """Pull a request's bytes and continue it, see `EngineWorker.take`."""
        ...

    async def checkpoint(self, name: str) -> bytes | None:
        """See `EngineWorker.checkpoint`."""
        ...

    async def resume(self, request: Request, data: bytes) -> None:
        """See `EngineWorker.resume`."""
        ...

    async def release(self, name: str) -> None:
        """See `EngineWorker.release`."""
        ...

    async def memory(self, name: str, layer: int) -> CacheSnapshot | None:
        """See `EngineWorker.memory`."""
        ...

    async def call(self, function: Callable[[AsyncLLM, *Args], Awaitable[T]], *args: *Args) -> T:
        """See `EngineWorker.call`; a function of a module that another process imports too."""
        ...

    async def close(self) -> None:
        """End the worker."""
        ...

    def kill(self) -> None:
        """End its process at once."""
        ...
