"""Dispatcher: gives requests to workers within their deadlines, and starts them again where a worker is lost."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import replace

from millpond.cluster.checkpoints import Checkpoints
from millpond.cluster.cluster_request import ClusterRequest
from millpond.cluster.event_loop import BackgroundTasks
from millpond.cluster.handle import WorkerHandle, WorkerLostError
from millpond.cluster.messages import RequestDelta, StartMessage, WorkerReport, error_of
from millpond.cluster.migration import Drain, Migrator
from millpond.cluster.replan import Replanner
from millpond.cluster.router import Load, PrefixLedger, RecentWork, choose
from millpond.cluster.settings import ClusterSettings
from millpond.cluster.start_batcher import StartBatcher
from millpond.cluster.worker_pool import MakeWorker, WorkerPool
from millpond.engine.cluster_figures import ClusterFigures, DrainResult, Role, WorkerInfo, together
from millpond.engine.outputs import CacheSnapshot, EngineStats, RequestOutput
from millpond.engine.request import CacheOptions, Request
from millpond.errors import MillpondError, OptionError

#: Seconds after a deadline in which the worker of a request may end it with its last tokens.
GRACE_S = 0.5


class Deadlines:
    """Timers of the requests of one event loop.

    Args:
        expired: Called with each request that is still in flight at its deadline.
    """

    def __init__(self, expired: Callable[[ClusterRequest], None]) -> None:
        self._expired = expired
        self._timers: dict[ClusterRequest, asyncio.TimerHandle] = {}

    def watch(self, entry: ClusterRequest) -> None:
        """Start the timer of a request.

        A deadline that is none is left to the engine, which refuses it.
        """
        deadline = entry.request.deadline
        if deadline is not None and deadline > 0:
            loop = asyncio.get_running_loop()
            self._timers[entry] = loop.call_later(deadline + GRACE_S, self._expired, entry)

    def forget(self, entry: ClusterRequest) -> None:
        """Stop the timer of a request."""
        timer = self._timers.pop(entry, None)
        if timer is not None:
            timer.cancel()


class RetryQueue:
    """Requests that were lost as often as they may be, and had no new token since.

    One of them may be what ends its workers. On a worker together they would end together; alone, it ends alone.

    Args:
        max_replays: Most restarts of a request in a row.
    """

    def __init__(self, max_replays: int) -> None:
        self._max_replays = max_replays
        self._trying: ClusterRequest | None = None
        self._waiting: dict[ClusterRequest, None] = {}  # in the order in which they came

    def acquire(self, entry: ClusterRequest, *, wait: bool) -> bool:
        """Return whether a request may go to a worker now.

        Args:
            entry: The request.
            wait: Let it wait if it may not; `release` returns it when its turn has come.
        """
        if not 0 < entry.replays >= self._max_replays:
            return True
        if self._trying in (None, entry):
            self._trying = entry
            return True
        if wait:
            self._waiting[entry] = None
        return False

    def release(self, entry: ClusterRequest) -> ClusterRequest | None:
        """Return the next request that may go to a worker, after one has a new token or has ended."""
        self._waiting.pop(entry, None)
        if self._trying is not entry:
            return None
        self._trying = next(iter(self._waiting), None)
        if self._trying is not None:
            del self._waiting[self._trying]
        return self._trying


#: Roles that read prompts.
READS: frozenset[Role] = frozenset({"replica", "prefill"})
#: Watched requests that have ended and whose workers are still known.
_WATCHED = 64


class Dispatcher:
    """The requests and workers of one cluster; others call `PoolListener` and `RequestBook`.

    Args:
        settings: Roles of the workers, and limits.
        make: See `MakeWorker`.
        block: Tokens of a block of a prompt that engines share with later ones.

    Attributes:
        figures: Counters.
        checkpoints: Copies of requests in flight.
    """

    def __init__(self, settings: ClusterSettings, make: MakeWorker, block: int) -> None:
        self.figures = ClusterFigures()
        self._settings = settings
        self._tasks = BackgroundTasks(self._failed)
        self._pool = WorkerPool(settings.roles, make, self._tasks, self)
        self._start_batcher = StartBatcher(self._tasks)
        self._migrator = Migrator(self, self._pool, self._tasks, self.figures, settings.lease_s)
        self.checkpoints = Checkpoints(settings, self, self._pool, self._migrator, self._tasks, self.figures)
        self._entries: dict[str, ClusterRequest] = {}
        self._by_name: dict[str, ClusterRequest] = {}
        self._watched: OrderedDict[str, tuple[str, str, str]] = OrderedDict()  # with worker, name and client
        self._prefixes, self._recent = PrefixLedger(block), RecentWork()
        self._retry_queue, self._deadlines = RetryQueue(settings.max_replays), Deadlines(self._expired)
        self._replanner = (
            None if settings.replan_s is None else Replanner(settings.replan_s, self._able_names, self._change_role)
        )
        self._without: dict[Role, MillpondError] = {}  # roles of which no worker is left or starts, and why
        self._closed = False

    async def open(self) -> None:
        """Start all workers.

        Raises:
            MillpondError: one of them does not start; all are ended.
        """
        await self._pool.open()
        if self._replanner is not None:
            self._tasks.run(self._replanner.run())

    async def close(self) -> None:
        """End all requests and all workers."""
        self._closed = True
        for entry in list(self._entries.values()):
            self.end(entry, MillpondError("the cluster was closed"))
        await self._tasks.cancel()
        await self._pool.close()

    @property
    def model(self) -> tuple[int, int, CacheOptions] | None:
        """Context length, vocabulary and cache options; None before `open`."""
        return self._pool.model

    def workers(self) -> list[WorkerInfo]:
        """Return all workers, by name."""
        return self._pool.info(Counter(one.worker for one in self._entries.values() if one.worker is not None))

    @property
    def step_age_s(self) -> float:
        """Of the step that has taken longest, at the last report of its worker; 0 where none is under way."""
        return max([*self._pool.step_ages_s.values()], default=0.0)

    def live(self) -> dict[Role, int]:
        """See `WorkerPool.live`."""
        return self._pool.live()

    def stats(self) -> EngineStats:
        """Return the statistics of all engines as one; requests without a worker wait."""
        stats = together([self._pool.stats[name] for name in self._pool.serving if name in self._pool.stats])
        homeless = sum(entry.worker is None for entry in self._entries.values())
        return replace(stats, waiting=stats.waiting + homeless)

    @property
    def busy(self) -> bool:
        """Whether requests are in flight."""
        return bool(self._entries)

    @property
    def serving(self) -> list[WorkerHandle]:
        """Workers that serve, by name."""
        return [handle for _, handle in sorted(self._pool.serving.items())]

    async def drain(self, worker: str, *, replaced: bool = True, role: Role | None = None) -> DrainResult:
        """Give the requests of a worker to others, and end it.

        Args:
            worker: Its name.
            replaced: Start another one in its place.
            role: Role of that one; None: its own.

        Raises:
            OptionError: a role that this cluster does not have, or see `WorkerPool.begin_drain`; it serves as before.
            MillpondError: no other worker starts; one of its own role is started in the background.
        """
        if role is not None and not replaced:
            raise OptionError(
                f"role={role!r} is that of the worker in its place, and there is to be none: leave one out"
            )
        changes = role is not None and role != self._role_of(worker)
        if changes and role not in self._settings.roles:
            roles = " and ".join(dict.fromkeys(self._settings.roles))
            raise OptionError(f"role={role!r}: the workers of this cluster are {roles} workers")
        handle, replacing = await self._pool.begin_drain(worker, replaced and not changes)
        began = time.monotonic()
        moved, again = await Drain(handle, self, self._migrator, self._tasks).run()
        seconds = time.monotonic() - began
        retired = await self._pool.retire(handle)
        self._keep_workers()
        if retired and changes and role is not None:
            try:
                await self._pool.start(role)
            except MillpondError:
                self._pool.replace(handle.role)
                raise
            self.figures.role_changes += 1
        elif retired and replaced and not replacing:
            self._pool.replace(handle.role)
        return DrainResult(worker, moved, again, seconds)

    def _keep_workers(self) -> None:
        """Forget what was known of workers that have gone."""
        self._prefixes.keep_workers(self._pool.serving)
        if self._replanner is not None:
            self._replanner.load.keep_workers(self._pool.serving)

    def _role_of(self, worker: str) -> Role | None:
        handle = self._pool.serving.get(worker)
        return None if handle is None else handle.role

    def _able_names(self) -> dict[Role, list[str]]:
        roles: tuple[Role, ...] = ("prefill", "decode")
        return {role: sorted(one.name for one in self._pool.able(role)) for role in roles}

    async def _change_role(self, worker: str, role: Role) -> DrainResult:
        return await self.drain(worker, role=role)

    # ------------------------------------------------------------------ requests

    def submit(self, request: Request, deliver: Callable[[RequestOutput], None]) -> None:
        """Take a request in; `deliver` is called with each of its outputs, the last one finished.

        Raises:
            OptionError: its name is in use. MillpondError: the cluster was closed, or a role has no worker any more.
        """
        if self._closed:
            raise MillpondError("the cluster was closed and takes no requests any more")
        for error in self._without.values():
            raise MillpondError(str(error))
        if request.request_id in self._entries:
            raise OptionError(f"request {request.request_id!r} is in flight already; give another name")
        entry = ClusterRequest(request, deliver)
        self._entries[request.request_id] = entry
        self._deadlines.watch(entry)
        self._route(entry)

    def cancel(self, request_id: str) -> None:
        """End a request with what it has, wherever it is; one that is not in flight is no error."""
        entry = self._entries.get(request_id)
        if entry is not None:
            entry.end("cancelled")
            self.end(entry)

    async def memory(self, request_id: str, layer: int, client: str | None = None) -> CacheSnapshot | None:
        """Return a snapshot as `AsyncLLM.memory`; None if no worker that serves has the request."""
        entry = self._entries.get(request_id)
        watched = self._watched.get(request_id) if entry is None else (entry.worker, entry.name, entry.request.client)
        if watched is None or client not in (None, watched[2]):
            return None
        worker, name, _ = watched
        handle = None if worker is None else self._pool.serving.get(worker)
        if handle is None:
            return None
        try:
            return await handle.memory(name, layer)
        except WorkerLostError:
            return None

    def requests_of(self, worker: str) -> list[ClusterRequest]:
        """See `RequestBook`."""
        return [entry for entry in self._entries.values() if entry.worker == worker]

    def is_current(self, name: str, entry: ClusterRequest) -> bool:
        """See `RequestBook`."""
        return self._by_name.get(name) is entry

    def choose_to_continue(self, roles: frozenset[Role], n_bytes: int, without: frozenset[str]) -> str | None:
        """See `RequestBook`."""
        return choose([one for one in self._loads() if one.worker not in without], roles, n_bytes)

    def cancel_on(self, handle: WorkerHandle, name: str) -> None:
        """See `RequestBook`."""
        self._start_batcher.cancel(handle, name)

    def may_move(self, entry: ClusterRequest) -> bool:
        """See `RequestBook`."""
        return self._retry_queue.acquire(entry, wait=False)

    def restart(self, entry: ClusterRequest, *, lost: bool = True) -> None:
        """See `RequestBook`."""
        self._by_name.pop(entry.name, None)
        entry.epoch += 1
        entry.targets.clear()
        if lost and not self._count_loss(entry):
            return
        self._by_name[entry.name] = entry
        if self._retry_queue.acquire(entry, wait=True):
            self._continue(entry)
        else:
            entry.worker, entry.place = None, "held"

    def transfer_timed_out(self, entry: ClusterRequest) -> None:
        """See `RequestBook`."""
        entry.misses += 1
        self.restart(entry, lost=False)

    def _count_loss(self, entry: ClusterRequest) -> bool:
        """Count a loss of a request with its worker; False: it was one too many and ended it."""
        entry.replays += 1
        if entry.replays <= self._settings.max_replays:
            return True
        error = MillpondError(
            f"the request was lost {entry.replays} times with its worker and had no new token in between; "
            f"max_replays={self._settings.max_replays} allows no more: it may be what ends them"
        )
        self.end(entry, error)
        return False

    def _continue(self, entry: ClusterRequest) -> None:
        """Send a request that was begun before to a worker."""
        if not self.checkpoints.resume(entry):
            self.figures.replayed += 1
            self._route(entry)

    def end(self, entry: ClusterRequest, error: MillpondError | None = None) -> None:
        """See `RequestBook`: nothing more comes of a request, and no worker has anything of it."""
        self._forget(entry)
        if error is not None:
            entry.end("error")
        handle = None if entry.worker is None else self._pool.serving.get(entry.worker)
        if handle is not None and not self._closed:
            self._start_batcher.cancel(handle, entry.name)
        entry.deliver(entry.output(finished=True, error=error))

    def _route(self, entry: ClusterRequest) -> None:
        """Send a request to a worker that reads prompts; without one it waits."""
        loads = self._loads()
        sharing = {name for name, stats in self._pool.stats.items() if stats.prefix is not None}
        if sharing and not entry.keys:
            entry.keys = self._prefixes.keys(entry.request)
        spared = {one.worker: self._prefixes.hits(one.worker, entry.keys) for one in loads if one.worker in sharing}
        if sharing:
            ahead = self._recent.ahead([one.worker for one in loads if one.role in READS])
            loads = [replace(one, ahead=ahead.get(one.worker, 0)) for one in loads]
        name = choose(loads, READS, spared=spared)
        entry.worker, entry.place = name, "unplaced" if name is None else "running"
        if name is not None:
            entry.spared = spared.get(name, 0)
            if name in sharing:
                self._prefixes.note(name, entry.keys)
                self._recent.note(name, entry.unread)
            self._by_name[entry.name] = entry
            start = StartMessage(entry.again(), stays=entry.misses > self._settings.max_replays)
            self._start_batcher.send(self._pool.serving[name], start)

    def _forget(self, entry: ClusterRequest) -> None:
        self._entries.pop(entry.request.request_id, None)
        self._deadlines.forget(entry)
        self.checkpoints.forget(entry)
        self._by_name.pop(entry.name, None)
        if entry.request.watch and entry.worker is not None:
            self._watched[entry.request.request_id] = entry.worker, entry.name, entry.request.client
            while len(self._watched) > _WATCHED:
                self._watched.popitem(last=False)
        self._release_retry(entry)

    def _release_retry(self, entry: ClusterRequest) -> None:
        """Let the next request have its last try, after one has a new token or has ended."""
        following = self._retry_queue.release(entry)
        if following is not None and not self._closed:
            self._continue(following)

    def _expired(self, entry: ClusterRequest) -> None:
        entry.end("deadline")
        self.end(entry)

    def _loads(self) -> list[Load]:
        by_worker: dict[str, list[ClusterRequest]] = {handle.name: [] for handle in self._pool.able()}
        for entry in self._entries.values():
            if entry.worker in by_worker:
                by_worker[entry.worker].append(entry)
        serving, stats = self._pool.serving, self._pool.stats
        return [
            Load(name, serving[name].role, sum(entry.unread for entry in has), len(has), stats.get(name))
            for name, has in by_worker.items()
        ]

    def _failed(self, error: BaseException) -> None:
        for entry in list(self._entries.values()):
            self.end(entry, MillpondError(f"the cluster failed with {type(error).__name__}"))

    # ------------------------------------------------------------------ workers that come, report and go

    def reported(self, handle: WorkerHandle, report: WorkerReport) -> None:
        """See `PoolListener`."""
        self._migrator.mark_responsive(handle.name)
        now = time.monotonic()
        if self._replanner is not None and self._pool.serving.get(handle.name) is handle:
            self._replanner.load.reported(handle.name, handle.role, report)
        for update in report.updates:
            entry = self._by_name.get(update.name)
            if entry is not None:  # else it is of an earlier epoch, or over
                self._update(handle, entry, update, now)
        if report.stats.prefix is not None:  # it holds that many blocks, and will hold those that it reads
            coming = sum(len(entry.keys) for entry in self.requests_of(handle.name) if not entry.begun)
            self._prefixes.trim(handle.name, report.stats.prefix.blocks + coming)

    def wanted(self, handle: WorkerHandle) -> frozenset[str]:
        """See `PoolListener`."""
        return frozenset(entry.name for entry in self.requests_of(handle.name) if entry.place in ("offered", "moving"))

    def lost(self, handle: WorkerHandle) -> None:
        """See `PoolListener`: its requests go to others."""
        self.figures.deaths += 1
        self._keep_workers()
        for entry in list(self._entries.values()):
            if entry.worker == handle.name:
                self.restart(entry)
            elif handle.name in entry.targets:  # its bytes wait elsewhere, for another one
                entry.targets.discard(handle.name)
                self._count_loss(entry)

    def joined(self, handle: WorkerHandle) -> None:
        """See `PoolListener`: requests without a worker have one."""
        self._without.pop(handle.role, None)
        for entry in [entry for entry in self._entries.values() if entry.place == "unplaced"]:
            self._route(entry)

    def role_failed(self, role: Role, error: MillpondError | None) -> None:
        """See `PoolListener`: no request can be answered, nor any that comes later."""
        self._without[role] = MillpondError(f"no {role} worker is left, and none starts: {error}")
        for entry in list(self._entries.values()):
            self.end(entry, self._without[role])

    def _update(self, handle: WorkerHandle, entry: ClusterRequest, update: RequestDelta, now: float) -> None:
        error = error_of(update)
        changed = entry.add(update, now)
        if update.finished:
            if self._replanner is not None and error is None:
                self._replanner.load.finished(*entry.lengths)
            self._forget(entry)
            if error is not None:
                entry.end("error")
        elif changed:
            self._release_retry(entry)
        if changed:
            entry.deliver(entry.output(finished=update.finished, error=error))
        if update.dropped:
            self.restart(entry, lost=False)
        elif update.offered is not None and not update.finished:
            entry.place = "offered"
            self._tasks.run(self._migrator.move(entry, handle, update.offered))
        elif changed and not update.finished:
            self.checkpoints.grown(entry, handle)
