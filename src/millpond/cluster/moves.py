"""Moves of requests from one worker to another with their caches, and workers that give away all of theirs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, Protocol

from millpond.cluster.cluster_request import ClusterRequest
from millpond.cluster.event_loop import BackgroundTasks, quietly
from millpond.cluster.figures import ClusterFigures
from millpond.cluster.handle import WorkerHandle, WorkerLostError
from millpond.cluster.settings import Role
from millpond.cluster.worker import HandoffGoneError
from millpond.cluster.worker_pool import WorkerPool
from millpond.errors import MillpondError, PoolFullError

#: Roles that go on with requests of a prefill worker, or of one that decodes; and with those of a replica.
DECODES: frozenset[Role] = frozenset({"decode"})
REPLICAS: frozenset[Role] = frozenset({"replica"})
#: Seconds between two tries to find room for a request that waits for another worker.
RETRY_S = 0.02


class RequestBook(Protocol):
    """The requests of a cluster, as far as those who move them need to know."""

    def current(self, name: str, entry: ClusterRequest) -> bool:
        """Whether a request is still in flight under this name."""
        ...

    def choose_to_continue(self, roles: frozenset[Role], n_bytes: int, without: frozenset[str]) -> str | None:
        """A worker of one of these roles for a request of `n_bytes` bytes; None: there is none."""
        ...

    def may_move(self, entry: ClusterRequest) -> bool:
        """Whether a request may go to another worker now; see `LastTries`."""
        ...

    def begin_again(self, entry: ClusterRequest, *, lost: bool = True) -> None:
        """Begin a request on another worker, with the tokens that were sent; lost: count it towards `max_replays`."""
        ...

    def missed(self, entry: ClusterRequest) -> None:
        """Begin a request again that no worker took in time; no worker was lost, and `max_replays` counts it not.

        After as many misses in a row as that allows losses it decodes where it is read.
        """
        ...

    def end(self, entry: ClusterRequest, error: MillpondError | None = None) -> None:
        """End a request, wherever it is."""
        ...

    def withdraw(self, handle: WorkerHandle, name: str) -> None:
        """Let a worker end a request that has begun again elsewhere."""
        ...

    def at(self, worker: str) -> list[ClusterRequest]:
        """Requests that a worker has."""
        ...


class Mover:
    """Moves requests of one cluster.

    Args:
        lease_s: seconds in which the worker that was chosen has to have a request.
    """

    def __init__(
        self, book: RequestBook, pool: WorkerPool, tasks: BackgroundTasks, figures: ClusterFigures, lease_s: float
    ) -> None:
        self._book, self._pool, self._tasks, self._figures, self._lease_s = book, pool, tasks, figures, lease_s
        self._silent: set[str] = set()  # workers that did not fetch in time and have not been heard of since

    def heard(self, worker: str) -> None:
        """A worker reports, so it can fetch."""
        self._silent.discard(worker)

    async def move(self, entry: ClusterRequest, source: WorkerHandle, n_bytes: int) -> None:
        """Let another worker continue a request that waits in `source`; it waits there until one has room."""
        name, began = entry.name, time.monotonic()
        roles = REPLICAS if source.role == "replica" else DECODES
        entry.place = "offered"
        while self._book.current(name, entry):
            chosen = None
            if self._book.may_move(entry):
                chosen = self._book.choose_to_continue(roles, n_bytes, frozenset(self._silent | {source.name}))
            if chosen is None:
                await asyncio.sleep(RETRY_S)
                continue
            entry.place = "moving"
            entry.targets.add(chosen)
            target = self._pool.serving[chosen]
            try:
                await self.within_lease(target.take(name, source.offered(name)), target, name)
            except (PoolFullError, WorkerLostError) as error:
                if self._book.current(name, entry):  # else it has begun again, and is in another place
                    entry.place = "offered"
                    if isinstance(error, PoolFullError):  # the loss of a worker is counted when it is noticed
                        entry.targets.discard(chosen)
                await asyncio.sleep(RETRY_S)
                continue
            except (HandoffGoneError, TimeoutError):
                if self._book.current(name, entry):
                    self._book.missed(entry)
            except MillpondError as error:
                if self._book.current(name, entry):
                    self._book.end(entry, error)
            else:
                self._count(entry, n_bytes, time.monotonic() - began)
                if self._book.current(name, entry):
                    self._arrived(entry, chosen)
                else:  # it was cancelled or begun again on its way, or has ended there
                    await quietly(target.cancel(name))
            break
        await quietly(source.release(name))

    @property
    def silent(self) -> frozenset[str]:
        """Workers that did not take a request in time, and have not been heard of since."""
        return frozenset(self._silent)

    async def within_lease(self, call: Coroutine[Any, Any, None], target: WorkerHandle, name: str) -> None:
        """Wait for a call by which a worker takes a request.

        Raises:
            TimeoutError: `target` has not answered within the lease. It is undone there whenever it does.
            MillpondError: see `EngineWorker.take`.
        """
        task = asyncio.ensure_future(call)
        try:
            done, _ = await asyncio.wait({task}, timeout=self._lease_s)
        except asyncio.CancelledError:
            task.cancel()
            raise
        if not done:
            self._silent.add(target.name)
            self._tasks.run(_undo(task, target, name))
            raise TimeoutError
        try:
            task.result()
        finally:  # an error refers to this frame: with the task in it, what it was given would stay in Ray's store
            del task, done

    def _count(self, entry: ClusterRequest, n_bytes: int, seconds: float) -> None:
        self._figures.moved += 1
        self._figures.moved_bytes += n_bytes
        self._figures.full_bytes += entry.full_bytes
        self._figures.move_s += seconds

    def _arrived(self, entry: ClusterRequest, worker: str) -> None:
        entry.worker, entry.place = worker, "running"
        entry.targets.clear()
        entry.misses = 0
        if worker not in self._pool.serving:  # lost between its answer and now
            self._book.begin_again(entry)


async def _undo(task: asyncio.Task[Any], target: WorkerHandle, name: str) -> None:
    """A worker took a request too late: it has gone on elsewhere."""
    await quietly(task)  # type: ignore[arg-type]
    await quietly(target.cancel(name))


#: Seconds in which requests move; what is left then is begun again elsewhere.
DRAIN_S = 1.5


class Drain:
    """One drain of a worker that gets no new requests any more.

    Args:
        within_s: seconds in which requests move with their caches; what is left then is begun again elsewhere.
    """

    def __init__(
        self, handle: WorkerHandle, book: RequestBook, mover: Mover, tasks: BackgroundTasks, within_s: float = DRAIN_S
    ) -> None:
        self._handle, self._book, self._mover, self._tasks = handle, book, mover, tasks
        self._until = time.monotonic() + within_s
        self._seen: dict[ClusterRequest, int] = {}  # with the epoch in which it was here
        self._replayed = 0

    async def run(self) -> tuple[int, int]:
        """Wait until the worker has no request; returns how many were moved, and how many begun again."""
        while (here := self._book.at(self._handle.name)) and time.monotonic() < self._until:
            for entry in here:
                self._seen.setdefault(entry, entry.epoch)
                if entry.place == "running":
                    entry.place = "leaving"
                    self._tasks.run(self._give(entry))
            await asyncio.sleep(RETRY_S / 4)
        for entry in self._book.at(self._handle.name):
            self._again(entry)
        moved = sum(one.epoch == epoch and one.worker != self._handle.name for one, epoch in self._seen.items())
        return moved, self._replayed

    async def _give(self, entry: ClusterRequest) -> None:
        """Let a request move to another worker; one without an answer is begun again there, and read there."""
        name = entry.name
        if not entry.begun:
            self._again(entry)
            return
        while self._book.current(name, entry) and entry.place == "leaving":
            try:
                n_bytes = await self._handle.offer(name)
            except HandoffGoneError:
                if self._book.current(name, entry):
                    self._again(entry)
                return
            except MillpondError:  # it is lost, or the request cannot be packed: it is begun again
                return
            if n_bytes is None:
                await asyncio.sleep(RETRY_S)
            elif self._book.current(name, entry):
                await self._mover.move(entry, self._handle, n_bytes)
            else:
                await quietly(self._handle.release(name))

    def _again(self, entry: ClusterRequest) -> None:
        self._replayed += 1
        name = entry.name
        self._book.begin_again(entry, lost=False)
        self._book.withdraw(self._handle, name)
