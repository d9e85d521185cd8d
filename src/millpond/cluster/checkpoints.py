"""Checkpoints: copies of requests that decode, from which they go on where their worker is lost."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass

from millpond.cluster.cluster_request import ClusterRequest
from millpond.cluster.event_loop import BackgroundTasks, quietly
from millpond.cluster.handle import WorkerHandle, WorkerLostError
from millpond.cluster.migration import DECODES, REPLICAS, RETRY_S, Migrator, RequestBook
from millpond.cluster.settings import ClusterSettings
from millpond.cluster.worker import BYTES_BESIDES, BYTES_FACTOR, HandoffBuffer
from millpond.cluster.worker_pool import WorkerPool
from millpond.engine.cluster_figures import ClusterFigures
from millpond.errors import MillpondError, PoolFullError


@dataclass(slots=True)
class _Copies:
    """Copies of one request.

    Attributes:
        next_at: Length of the longest answer at which the next one is due.
        key: Key of the newest that is held; None: none is.
        number: Copies that were begun.
    """

    next_at: float
    key: str | None = None
    number: int = 0


class Checkpoints:
    """Newest copy of each request of a cluster, in this process's memory and within a limit.

    A worker makes one copy at a time. A copy for which there is no room is left out; the previous one stays.
    """

    def __init__(
        self,
        settings: ClusterSettings,
        book: RequestBook,
        pool: WorkerPool,
        migrator: Migrator,
        tasks: BackgroundTasks,
        figures: ClusterFigures,
    ) -> None:
        self._every, self._lease_s = settings.checkpoint_tokens, settings.lease_s
        self._roles = REPLICAS if settings.decode is None else DECODES
        self._book, self._pool, self._migrator, self._tasks, self._figures = book, pool, migrator, tasks, figures
        self._store = HandoffBuffer(settings.handoff_bytes, math.inf)
        self._copies: dict[str, _Copies] = {}  # by the id of the request
        self._at_work: set[str] = set()  # workers that make a copy

    @property
    def size(self) -> int:
        """Bytes that are held, or expected."""
        return self._store.size

    def grown(self, entry: ClusterRequest, handle: WorkerHandle) -> None:
        """Begin a copy of a request with new tokens where one is due."""
        if self._every is None or entry.place != "running":
            return
        copies = self._copies.setdefault(entry.request.request_id, _Copies(self._every))
        if entry.length < copies.next_at or handle.name in self._at_work:
            return
        copies.number += 1
        copies.next_at = entry.length + self._every
        key = f"{entry.request.request_id}@{copies.number}"
        if self._store.reserve(key, int(BYTES_FACTOR * entry.kv_bytes) + BYTES_BESIDES):
            self._at_work.add(handle.name)
            self._tasks.run(self._copy(entry, handle, copies, key))

    def resume(self, entry: ClusterRequest) -> bool:
        """Let another worker continue a request from its copy; False: there is none."""
        copies = self._copies.get(entry.request.request_id)
        if copies is None or copies.key is None:
            return False
        entry.worker, entry.place = None, "moving"
        self._tasks.run(self._resume(entry, self._store.fetch(copies.key)))
        return True

    def forget(self, entry: ClusterRequest) -> None:
        """Free the copy of a request."""
        copies = self._copies.pop(entry.request.request_id, None)
        if copies is not None and copies.key is not None:
            self._store.drop(copies.key)

    async def _copy(self, entry: ClusterRequest, handle: WorkerHandle, copies: _Copies, key: str) -> None:
        name, data = entry.name, None
        try:
            data = await handle.checkpoint(name)
        except WorkerLostError:
            pass  # then it goes on from the copy before
        except MillpondError:  # it cannot be copied
            copies.next_at = math.inf
        finally:
            self._at_work.discard(handle.name)
            if data is None:
                self._store.drop(key)
        if data is None:
            return
        is_wanted = self._copies.get(entry.request.request_id) is copies and self._book.is_current(name, entry)
        if not is_wanted or not self._store.put(key, data):
            self._store.drop(key)
            return
        if copies.key is not None:
            self._store.drop(copies.key)
        copies.key = key
        self._figures.checkpoints += 1
        self._figures.checkpoint_bytes += len(data)

    async def _resume(self, entry: ClusterRequest, data: bytes) -> None:
        """Continue a request at the first worker with room; restart it if there is none in time."""
        name, until = entry.name, time.monotonic() + self._lease_s
        while self._book.is_current(name, entry):
            worker = self._book.choose_to_continue(self._roles, len(data), self._migrator.unresponsive)
            if worker is None:  # until one is there, or none starts any more and the request is ended
                await asyncio.sleep(RETRY_S)
                until = time.monotonic() + self._lease_s
                continue
            target, entry.worker = self._pool.serving[worker], worker
            try:
                await self._migrator.within_lease(target.resume(entry.again(), data), target, name)
            except (PoolFullError, WorkerLostError):
                if self._book.is_current(name, entry) and time.monotonic() > until:
                    self._read_again(entry)
                await asyncio.sleep(RETRY_S)
            except (MillpondError, TimeoutError):  # the prompt is read as if there were no copy
                if self._book.is_current(name, entry):
                    self._read_again(entry)
            else:
                await self._arrived(entry, name, target)
                return

    def _read_again(self, entry: ClusterRequest) -> None:
        self.forget(entry)
        self._book.restart(entry, lost=False)

    async def _arrived(self, entry: ClusterRequest, name: str, target: WorkerHandle) -> None:
        self._figures.resumed += 1
        if not self._book.is_current(name, entry):  # it was cancelled on its way, or has ended there
            await quietly(target.cancel(name))
            return
        entry.place = "running"
        if target.name not in self._pool.serving:  # lost between its answer and now
            self._book.restart(entry)
