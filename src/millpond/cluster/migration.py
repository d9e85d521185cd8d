"""Migration of requests between workers with their caches, and draining of workers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, Protocol

from millpond.cluster.cluster_request import ClusterRequest
from millpond.cluster.event_loop import BackgroundTasks, quietly
from millpond.cluster.handle import WorkerHandle, WorkerLostError
from millpond.cluster.worker import HandoffGoneError
from millpond.cluster.worker_pool import WorkerPool
from millpond.engine.cluster_figures import ClusterFigures, Role
from millpond.errors import MillpondError, PoolFullError

#: Roles that go on with requests of a prefill worker, or of one that decodes; and with those of a replica.
DECODES: frozenset[Role] = frozenset({"decode"})
REPLICAS: frozenset[Role] = frozenset({"replica"})
#: Seconds between two tries to find room for a request that waits for another worker.
RETRY_S = 0.02


class RequestBook(Protocol):
    """The requests of a cluster, as far as those who move them need to know."""

    def is_current(self, name: str, entry: ClusterRequest) -> bool:
        """Whether a request is still in flight under this name."""
        ...

    def choose_to_continue(self, roles: frozenset[Role], n_bytes: int, without: frozenset[str]) -> str | None:
        """Return a worker of one of these roles with room for a request; None: there is none."""
        ...

    def may_move(self, entry: ClusterRequest) -> bool:
        """Whether a request may go to another worker now; see `RetryQueue`."""
        ...

    def restart(self, entry: ClusterRequest, *, lost: bool = True) -> None:
        """Begin a request on another worker, with the tokens that were sent.

        Args:
            entry: The request.
            lost: Count it towards `max_replays`.
        """
        ...

    def transfer_timed_out(self, entry: ClusterRequest) -> None:
        """Restart a request that no worker took in time.

        No worker was lost, so `max_replays` does not count it. After as many misses in a row as that allows losses it
        decodes where it is read.
        """
        ...

    def end(self, entry: ClusterRequest, error: MillpondError | None = None) -> None:
        """End a request, wherever it is."""
        ...

    def cancel_on(self, handle: WorkerHandle, name: str) -> None:
        """Let a worker end a request that was restarted elsewhere."""
        ...

    def requests_of(self, worker: str) -> list[ClusterRequest]:
        """Return the requests that a worker has."""
        ...


class Migrator:
    """Moves requests of one cluster from worker to worker.

    Args:
        book: Requests of the cluster.
        pool: Its workers.
        tasks: Tasks in the background.
        figures: Counters.
        lease_s: Seconds in which the worker that was chosen has to have a request.
    """

    def __init__(
        self, book: RequestBook, pool: WorkerPool, tasks: BackgroundTasks, figures: ClusterFigures, lease_s: float
    ) -> None:
        self._book, self._pool, self._tasks, self._figures, self._lease_s = book, pool, tasks, figures, lease_s
        self._unresponsive: set[str] = set()  # workers that did not fetch in time and have not been heard of since

    def mark_responsive(self, worker: str) -> None:
        """Record that a worker reports, so it can fetch."""
        self._unresponsive.discard(worker)

    async def move(self, entry: ClusterRequest, source: WorkerHandle, n_bytes: int) -> None:
        """Let another worker continue a request that waits in `source` until one has room."""
        name, began = entry.name, time.monotonic()
        roles = REPLICAS if source.role == "replica" else DECODES
        entry.place = "offered"
        while self._book.is_current(name, entry):
            worker = None
            if self._book.may_move(entry):
                worker = self._book.choose_to_continue(roles, n_bytes, frozenset(self._unresponsive | {source.name}))
            if worker is None:
                await asyncio.sleep(RETRY_S)
                continue
            entry.place = "moving"
            entry.targets.add(worker)
            target = self._pool.serving[worker]
            try:
                await self.within_lease(target.take(name, source.offered(name)), target, name)
            except (HandoffGoneError, TimeoutError):
                if self._book.is_current(name, entry):
                    self._book.transfer_timed_out(entry)
            except MillpondError as error:
                leaves = not self._pool.is_able(target)  # it was drained meanwhile: its engine is closed
                if not leaves and not isinstance(error, PoolFullError | WorkerLostError):
                    if self._book.is_current(name, entry):
                        self._book.end(entry, error)
                    break
                if self._book.is_current(name, entry):  # else it was restarted elsewhere
                    entry.place = "offered"
                    if not isinstance(error, WorkerLostError):  # the loss of a worker is counted when it is noticed
                        entry.targets.discard(worker)
                await asyncio.sleep(RETRY_S)
                continue
            else:
                self._count(entry, n_bytes, time.monotonic() - began)
                if self._book.is_current(name, entry):
                    self._arrived(entry, worker)
                else:  # it was cancelled or restarted on its way, or has ended there
                    await quietly(target.cancel(name))
            break
        await quietly(source.release(name))

    @property
    def unresponsive(self) -> frozenset[str]:
        """Workers that did not take a request in time, and have not been heard of since."""
        return frozenset(self._unresponsive)

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
            self._unresponsive.add(target.name)
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
            self._book.restart(entry)


async def _undo(task: asyncio.Task[Any], target: WorkerHandle, name: str) -> None:
    """Cancel a request at a worker that took it too late: it has continued elsewhere."""
    await quietly(task)  # type: ignore[arg-type]
    await quietly(target.cancel(name))


#: Seconds in which requests move; the remaining ones are restarted elsewhere.
DRAIN_S = 1.5


class Drain:
    """One drain of a worker that gets no new requests any more.

    Args:
        handle: The worker.
        book: Requests of the cluster.
        migrator: Moves its requests.
        tasks: Tasks in the background.
        within_s: Seconds in which requests move with their caches; the remaining ones are restarted elsewhere.
    """

    def __init__(
        self,
        handle: WorkerHandle,
        book: RequestBook,
        migrator: Migrator,
        tasks: BackgroundTasks,
        within_s: float = DRAIN_S,
    ) -> None:
        self._handle, self._book, self._migrator, self._tasks = handle, book, migrator, tasks
        self._until = time.monotonic() + within_s
        self._seen: dict[ClusterRequest, int] = {}  # with the epoch in which it was here
        self._replayed = 0

    async def run(self) -> tuple[int, int]:
        """Wait until the worker has no request; return how many were moved, how many restarted."""
        while (entries := self._book.requests_of(self._handle.name)) and time.monotonic() < self._until:
            for entry in entries:
                self._seen.setdefault(entry, entry.epoch)
                if entry.place == "running":
                    entry.place = "leaving"
                    self._tasks.run(self._give(entry))
            await asyncio.sleep(RETRY_S / 4)
        for entry in self._book.requests_of(self._handle.name):
            self._again(entry)
        moved = sum(one.epoch == epoch and one.worker != self._handle.name for one, epoch in self._seen.items())
        return moved, self._replayed

    async def _give(self, entry: ClusterRequest) -> None:
        """Let a request move to another worker; one without an answer is restarted there."""
        name = entry.name
        if not entry.begun:
            self._again(entry)
            return
        while self._book.is_current(name, entry) and entry.place == "leaving":
            try:
                n_bytes = await self._handle.offer(name)
            except HandoffGoneError:
                if self._book.is_current(name, entry):
                    self._again(entry)
                return
            except MillpondError:  # it is lost, or the request cannot be packed: it is restarted
                return
            if n_bytes is None:
                await asyncio.sleep(RETRY_S)
            elif self._book.is_current(name, entry):
                await self._migrator.move(entry, self._handle, n_bytes)
            else:
                await quietly(self._handle.release(name))

    def _again(self, entry: ClusterRequest) -> None:
        self._replayed += 1
        name = entry.name
        self._book.restart(entry, lost=False)
        self._book.cancel_on(self._handle, name)
