"""Dispatcher: gives requests to workers, moves them between workers, and begins them again where a worker is lost.

All of it runs in one event loop, and nothing in it waits for one worker alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

from millpond.cluster.figures import ClusterFigures, WorkerInfo, together
from millpond.cluster.handle import WorkerHandle, WorkerLostError
from millpond.cluster.ledger import LedgerEntry
from millpond.cluster.messages import RequestUpdate, WorkerReport, error_of
from millpond.cluster.router import Load, choose
from millpond.cluster.settings import ClusterSettings
from millpond.cluster.worker import Role
from millpond.engine.outputs import CacheSnapshot, EngineStats, RequestOutput
from millpond.engine.request import CacheOptions, Request
from millpond.errors import MillpondError, OptionError, PoolFullError

#: Makes a worker of a name and a role; it is opened by the dispatcher.
MakeWorker = Callable[[str, Role], WorkerHandle]
#: Roles that read prompts, and roles that go on behind them.
READS: frozenset[Role] = frozenset({"replica", "prefill"})
DECODES: frozenset[Role] = frozenset({"decode"})
#: Seconds between two tries to find room for a request that waits for a worker which decodes.
_RETRY_S = 0.02
#: Times that a worker is made again which does not start.
_STARTS = 3

_log = logging.getLogger(__name__)


class Dispatcher:
    """The requests and the workers of one cluster.

    Args:
        settings: roles of the workers, and limits. make: see `MakeWorker`.

    Attributes:
        figures: counters. model: context length, vocabulary and cache options, known after `open`.
    """

    def __init__(self, settings: ClusterSettings, make: MakeWorker) -> None:
        self.figures = ClusterFigures()
        self.model: tuple[int, int, CacheOptions] | None = None
        self._settings, self._make = settings, make
        self._workers: dict[str, WorkerHandle] = {}
        self._starting: dict[str, WorkerHandle] = {}
        self._stats: dict[str, EngineStats] = {}
        self._entries: dict[str, LedgerEntry] = {}
        self._by_name: dict[str, LedgerEntry] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._numbers: dict[Role, itertools.count[int]] = {}
        self._closed = False

    # ------------------------------------------------------------------ workers

    async def open(self) -> None:
        """Start all workers.

        Raises:
            MillpondError: one of them does not start; all are ended.
        """
        handles = [self._new(role) for role in self._settings.roles]
        found = await asyncio.gather(*(handle.open() for handle in handles), return_exceptions=True)
        errors = [one for one in found if isinstance(one, BaseException)]
        if errors:
            for handle in handles:
                handle.kill()
            raise errors[0]
        for handle, model in zip(handles, found, strict=True):
            assert not isinstance(model, BaseException)
            self.model = model
            self._serve(handle)

    async def close(self) -> None:
        """End all requests and all workers."""
        self._closed = True
        for entry in list(self._entries.values()):
            self._end(entry, error=MillpondError("the cluster was closed"))
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for handle in [*self._workers.values(), *self._starting.values()]:
            with contextlib.suppress(TimeoutError, MillpondError):
                await asyncio.wait_for(handle.close(), 5.0)
            handle.kill()
        self._workers.clear()
        self._starting.clear()

    def workers(self) -> list[WorkerInfo]:
        """All of them, by name."""
        found = [
            WorkerInfo(one.name, one.role, one.pid, one.node, "serving", self._stats.get(one.name))
            for one in self._workers.values()
        ]
        found += [WorkerInfo(one.name, one.role, 0, "", "starting", None) for one in self._starting.values()]
        return sorted(found, key=lambda one: one.name)

    def stats(self) -> EngineStats:
        """All engines as one; what has no worker waits."""
        found = together([self._stats[name] for name in self._workers if name in self._stats])
        homeless = sum(entry.worker is None for entry in self._entries.values())
        return replace(found, waiting=found.waiting + homeless)

    @property
    def busy(self) -> bool:
        """Whether requests are in flight."""
        return bool(self._entries)

    def missing(self) -> list[Role]:
        """Roles without a worker that serves."""
        there = {handle.role for handle in self._workers.values()}
        return [role for role in dict.fromkeys(self._settings.roles) if role not in there]

    def _new(self, role: Role) -> WorkerHandle:
        number = next(self._numbers.setdefault(role, itertools.count()))
        return self._make(f"{role}-{number}", role)

    def _serve(self, handle: WorkerHandle) -> None:
        self._workers[handle.name] = handle
        self._run(self._watch(handle))

    async def _watch(self, handle: WorkerHandle) -> None:
        """Take in a worker's reports until it is lost."""
        try:
            while not self._closed:
                report = await handle.report()
                self._take_in(handle, report)
                if report.trouble is not None:
                    raise WorkerLostError(f"worker {handle.name}: {report.trouble}")
        except WorkerLostError as error:
            if not self._closed:
                self._lose(handle, error)

    def _lose(self, handle: WorkerHandle, error: WorkerLostError) -> None:
        """A worker is gone: its requests go to others, and another worker takes its place."""
        _log.warning("worker %s is lost and will be replaced: %s", handle.name, error)
        self.figures.deaths += 1
        del self._workers[handle.name]
        self._stats.pop(handle.name, None)
        handle.kill()
        self._run(self._replace(handle.role))
        for entry in [entry for entry in self._entries.values() if entry.worker == handle.name]:
            self._begin_again(entry)

    async def _replace(self, role: Role) -> None:
        error: MillpondError | None = None
        for _ in range(_STARTS):
            handle = self._new(role)
            self._starting[handle.name] = handle
            try:
                await handle.open()
                self._serve(handle)
                for entry in [entry for entry in self._entries.values() if entry.worker is None]:
                    self._route(entry)
                return
            except MillpondError as failed:
                error = failed
                handle.kill()
            finally:
                del self._starting[handle.name]
        _log.error("no %s worker starts any more: %s", role, error)
        if role in self.missing():
            for entry in list(self._entries.values()):
                self._end(entry, error=MillpondError(f"no {role} worker is left, and none starts: {error}"))

    # ------------------------------------------------------------------ requests

    def submit(self, request: Request, deliver: Callable[[RequestOutput], None]) -> None:
        """Take a request in; `deliver` is called with each of its outputs, the last one finished.

        Raises:
            OptionError: its name is in use. MillpondError: the cluster was closed.
        """
        if self._closed:
            raise MillpondError("the cluster was closed and takes no requests any more")
        if request.request_id in self._entries:
            raise OptionError(f"request {request.request_id!r} is in flight already; give another name")
        entry = LedgerEntry(request, deliver)
        self._entries[request.request_id] = entry
        self._route(entry)

    def cancel(self, request_id: str) -> None:
        """End a request with what it has, wherever it is; one that is not there any more is no error."""
        entry = self._entries.get(request_id)
        if entry is not None:
            entry.end("cancelled")
            self._end(entry)

    async def memory(self, request_id: str, layer: int) -> CacheSnapshot | None:
        """See `AsyncLLM.memory`; None while the request is at no worker."""
        entry = self._entries.get(request_id)
        handle = None if entry is None or entry.worker is None else self._workers.get(entry.worker)
        if entry is None or handle is None:
            return None
        try:
            return await handle.memory(entry.name, layer)
        except WorkerLostError:
            return None

    def _route(self, entry: LedgerEntry) -> None:
        """Send a request to a worker that reads prompts; without one it waits."""
        name = choose(self._loads(), READS)
        entry.worker, entry.place = name, "nowhere" if name is None else "running"
        if name is not None:
            self._by_name[entry.name] = entry
            self._run(self._send(self._workers[name], entry.again()))

    async def _send(self, handle: WorkerHandle, request: Request) -> None:
        try:
            await handle.start(request)
        except WorkerLostError:
            return  # its reports end too, and then the request goes to another

    def _begin_again(self, entry: LedgerEntry) -> None:
        self._by_name.pop(entry.name, None)
        entry.epoch += 1
        entry.replays += 1
        if entry.replays > self._settings.max_replays:
            error = MillpondError(
                f"the request was lost {entry.replays} times with its worker and had no new token in between; "
                f"max_replays={self._settings.max_replays} allows no more: it may be what ends them"
            )
            self._end(entry, error=error)
            return
        self.figures.replayed += 1
        self._route(entry)

    def _end(self, entry: LedgerEntry, error: MillpondError | None = None) -> None:
        """Nothing more comes of a request, and no worker has anything of it."""
        self._entries.pop(entry.request.request_id, None)
        self._by_name.pop(entry.name, None)
        if error is not None:
            entry.end("error")
        handle = None if entry.worker is None else self._workers.get(entry.worker)
        if handle is not None and not self._closed:
            self._run(self._quietly(handle.cancel(entry.name)))
        entry.deliver(entry.output(finished=True, error=error))

    def _loads(self) -> list[Load]:
        mine: dict[str, list[LedgerEntry]] = {name: [] for name in self._workers}
        for entry in self._entries.values():
            if entry.worker in mine:
                mine[entry.worker].append(entry)
        return [
            Load(name, self._workers[name].role, sum(entry.unread for entry in has), len(has), self._stats.get(name))
            for name, has in mine.items()
        ]

    # ------------------------------------------------------------------ reports

    def _take_in(self, handle: WorkerHandle, report: WorkerReport) -> None:
        self._stats[handle.name] = report.stats
        now = time.monotonic()
        for update in report.updates:
            entry = self._by_name.get(update.name)
            if entry is not None:  # else it is of an earlier epoch, or over
                self._update(handle, entry, update, now)

    def _update(self, handle: WorkerHandle, entry: LedgerEntry, update: RequestUpdate, now: float) -> None:
        error = error_of(update)
        changed = entry.add(update, now)
        if update.finished:
            self._entries.pop(entry.request.request_id, None)
            self._by_name.pop(entry.name, None)
            if error is not None:
                entry.end("error")
        if changed:
            entry.deliver(entry.output(finished=update.finished, error=error))
        if update.offered is not None and not update.finished:
            entry.place = "offered"
            self._run(self._move(entry, handle, update.offered))

    async def _move(self, entry: LedgerEntry, source: WorkerHandle, n_bytes: int) -> None:
        """Let a worker that decodes take a request over; it waits where it is until one has room."""
        name, began = entry.name, time.monotonic()
        while self._by_name.get(name) is entry:
            chosen = choose(self._loads(), DECODES, n_bytes)
            if chosen is None:
                await asyncio.sleep(_RETRY_S)
                continue
            target = self._workers[chosen]
            entry.place = "moving"
            try:
                await target.take(name, source.offered(name))
            except (PoolFullError, WorkerLostError):
                entry.place = "offered"
                await asyncio.sleep(_RETRY_S)
                continue
            except MillpondError as error:
                if self._by_name.get(name) is entry:
                    self._end(entry, error=error)
                return
            if self._by_name.get(name) is entry:
                entry.worker, entry.place = chosen, "running"
                self.figures.moved += 1
                self.figures.moved_bytes += n_bytes
                self.figures.full_bytes += entry.full_bytes
                self.figures.move_s += time.monotonic() - began
            else:  # it was cancelled or begun again on its way, or has ended there
                await self._quietly(target.cancel(name))
            if chosen not in self._workers and self._by_name.get(name) is entry:
                self._begin_again(entry)  # lost between its answer and now
            await self._quietly(source.release(name))
            return
        await self._quietly(source.release(name))

    # ------------------------------------------------------------------ tasks

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.critical("a task of the cluster ended with an error", exc_info=error)
            for entry in list(self._entries.values()):
                self._end(entry, error=MillpondError(f"the cluster failed with {type(error).__name__}"))

    @staticmethod
    async def _quietly(work: Coroutine[Any, Any, None]) -> None:
        """What need not succeed where a worker is gone."""
        with contextlib.suppress(MillpondError):
            await work
