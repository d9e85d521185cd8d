"""WorkerPool: starts the workers of a cluster, reads their reports, and replaces those that are lost or retired."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from millpond.cluster.event_loop import BackgroundTasks
from millpond.cluster.handle import WorkerHandle, WorkerLostError
from millpond.cluster.messages import WorkerReport
from millpond.engine.cluster_figures import Role, WorkerInfo
from millpond.engine.outputs import EngineStats
from millpond.engine.request import CacheOptions
from millpond.errors import CacheMismatchError, MillpondError, OptionError

#: Makes a worker of a name and a role; it is opened by the pool.
MakeWorker = Callable[[str, Role], WorkerHandle]
#: Times that a worker is made again which does not start.
_STARTS = 3
#: Seconds that a worker has to end by itself.
_CLOSE_S = 2.0

_log = logging.getLogger(__name__)


class PoolListener(Protocol):
    """Calls of a pool as its workers come and go."""

    def reported(self, handle: WorkerHandle, report: WorkerReport) -> None:
        """Take in the report of a worker."""
        ...

    def wanted(self, handle: WorkerHandle) -> frozenset[str]:
        """Return names of the requests that wait in a worker and whose bytes are still wanted."""
        ...

    def lost(self, handle: WorkerHandle) -> None:
        """Restart the requests of a worker that was lost and is in the pool no more."""
        ...

    def joined(self, handle: WorkerHandle) -> None:
        """Give requests to a worker that serves from now on."""
        ...

    def role_failed(self, role: Role, error: MillpondError | None) -> None:
        """End all requests: no worker of a role is left, and none starts."""
        ...


class WorkerPool:
    """The workers of one cluster.

    Args:
        roles: One for each worker.
        make: See `MakeWorker`.
        tasks: Tasks in the background.
        listener: Hears of workers that come, report and go.

    Attributes:
        serving: Workers that serve, those that are being drained among them, by name.
        draining: Names of the latter.
        stats: Statistics of the last reports, by name.
        handoff_bytes: Bytes that wait for others in a worker, by name.
        step_ages_s: Seconds since the steps began that their engines are at, by name.
        model: Context length, vocabulary and cache options, known after `open`.
    """

    def __init__(self, roles: Sequence[Role], make: MakeWorker, tasks: BackgroundTasks, listener: PoolListener) -> None:
        self.serving: dict[str, WorkerHandle] = {}
        self.draining: set[str] = set()
        self.stats: dict[str, EngineStats] = {}
        self.handoff_bytes: dict[str, int] = {}
        self.step_ages_s: dict[str, float] = {}
        self.model: tuple[int, int, CacheOptions] | None = None
        self._roles, self._make, self._tasks, self._listener = tuple(roles), make, tasks, listener
        self._starting: dict[str, WorkerHandle] = {}
        self._numbers: dict[Role, itertools.count[int]] = {}
        self._leaving: set[str] = set()  # those that are being drained, or will be
        self._codes: str | None = None  # mark of the codes in which requests move
        self._closed = False

    async def open(self) -> None:
        """Start all workers.

        Raises:
            MillpondError: one of them does not start; all are ended.
            CacheMismatchError: their codes differ; all are ended.
        """
        handles = [self._new(role) for role in self._roles]
        results = await asyncio.gather(*(self._open(handle) for handle in handles), return_exceptions=True)
        errors = [one for one in results if isinstance(one, BaseException)]
        if errors:
            for handle in handles:
                handle.kill()
            raise errors[0]
        for handle in handles:
            self._serve(handle)

    async def _open(self, handle: WorkerHandle) -> None:
        """Start a worker, and compare its codes with those of the others.

        Raises:
            MillpondError: it does not start.
            CacheMismatchError: other workers have other codes.
        """
        context, vocabulary, cache, codes = await handle.open()
        if self.model is not None and codes != self._codes:
            raise CacheMismatchError(
                f"worker {handle.name} sends caches {_in_codes(codes)}, and others {_in_codes(self._codes)}: give all "
                "the same storage_codec and the same transform file as calibration, on every machine"
            )
        self.model, self._codes = (context, vocabulary, cache), codes

    async def close(self) -> None:
        """End all workers."""
        self._closed = True
        for handle in [*self.serving.values(), *self._starting.values()]:
            await _end(handle)
        self.serving.clear()
        self._starting.clear()

    def info(self, requests: Mapping[str, int]) -> list[WorkerInfo]:
        """Return all workers, by name.

        Args:
            requests: Number of requests of each.
        """
        workers = [
            WorkerInfo(
                name,
                one.role,
                one.pid,
                one.node,
                "draining" if name in self.draining else "serving",
                self.stats.get(name),
                requests.get(name, 0),
                self.handoff_bytes.get(name, 0),
            )
            for name, one in self.serving.items()
        ]
        workers += [WorkerInfo(one.name, one.role, 0, "", "starting", None) for one in self._starting.values()]
        return sorted(workers, key=lambda one: one.name)

    def is_able(self, handle: WorkerHandle) -> bool:
        """Return whether a worker takes new requests: it serves, and is not being drained."""
        return self.serving.get(handle.name) is handle and handle.name not in self.draining

    def able(self, role: Role | None = None) -> list[WorkerHandle]:
        """Return workers that take new requests; of one role, or of all."""
        return [one for one in self.serving.values() if self.is_able(one) and (role is None or one.role == role)]

    def live(self) -> dict[Role, int]:
        """Return numbers of workers that take new requests, by role; 0 if there is none."""
        return {role: len(self.able(role)) for role in dict.fromkeys(self._roles)}

    async def begin_drain(self, name: str, replace: bool) -> tuple[WorkerHandle, bool]:
        """Give a worker no new requests; start another first if it is the only one of its role.

        Returns:
            The worker, and whether another one has started in its place.

        Raises:
            OptionError: there is no such worker, it is being drained already, or none of its role would be left.
            MillpondError: no other worker starts; it serves as before.
        """
        handle = self.serving.get(name)
        if handle is None:
            names = ", ".join(sorted(self.serving)) or "none"
            raise OptionError(f"no worker {name!r} serves; those that do: {names}")
        if name in self._leaving:
            raise OptionError(f"worker {name!r} is being drained already: wait until it has ended")
        others = [one for one in self.able(handle.role) if one is not handle]
        if not others and not replace:
            raise OptionError(
                f"worker {name!r} is the only {handle.role} worker: drain it with a replacement, or stop the cluster"
            )
        self._leaving.add(name)
        if not others:
            try:
                await self.start(handle.role)
            except BaseException:
                self._leaving.discard(name)
                raise
        if self.serving.get(name) is not handle:
            raise OptionError(f"worker {name!r} was lost meanwhile, and its requests went to others")
        self.draining.add(name)
        return handle, not others

    async def retire(self, handle: WorkerHandle) -> bool:
        """End a worker; False: it was lost before."""
        if not self._remove(handle):
            return False
        await _end(handle)
        return True

    def replace(self, role: Role) -> None:
        """Start one more worker in the background; the listener hears of repeated failure."""
        self._tasks.run(self._replace(role))

    def _new(self, role: Role) -> WorkerHandle:
        number = next(self._numbers.setdefault(role, itertools.count()))
        return self._make(f"{role}-{number}", role)

    def _serve(self, handle: WorkerHandle) -> None:
        self.serving[handle.name] = handle
        self._tasks.run(self._watch(handle))

    def _remove(self, handle: WorkerHandle) -> bool:
        if self.serving.get(handle.name) is not handle:
            return False
        del self.serving[handle.name]
        self.draining.discard(handle.name)
        self._leaving.discard(handle.name)
        self.stats.pop(handle.name, None)
        self.handoff_bytes.pop(handle.name, None)
        self.step_ages_s.pop(handle.name, None)
        return True

    async def _watch(self, handle: WorkerHandle) -> None:
        """Take in a worker's reports until it is lost or retired."""
        try:
            while not self._closed:
                report = await handle.report(self._listener.wanted(handle))
                if self.serving.get(handle.name) is handle:
                    self.stats[handle.name], self.handoff_bytes[handle.name] = report.stats, report.handoff_bytes
                    self.step_ages_s[handle.name] = report.step_age_s
                self._listener.reported(handle, report)
                if report.trouble is not None:
                    raise WorkerLostError(f"worker {handle.name}: {report.trouble}")
        except Exception as error:  # whatever it is, its requests must go on elsewhere
            if self._closed or not self._remove(handle):
                return
            unexpected = None if isinstance(error, WorkerLostError) else error
            _log.warning("worker %s is lost and will be replaced: %s", handle.name, error, exc_info=unexpected)
            handle.kill()
            self.replace(handle.role)
            self._listener.lost(handle)

    async def start(self, role: Role) -> None:
        """Start a worker.

        Raises:
            MillpondError: no worker of this role starts.
        """
        handle = self._new(role)
        self._starting[handle.name] = handle
        try:
            await self._open(handle)
        except BaseException:
            handle.kill()
            raise
        finally:
            del self._starting[handle.name]
        self._serve(handle)
        self._listener.joined(handle)

    async def _replace(self, role: Role) -> None:
        error: MillpondError | None = None
        for _ in range(_STARTS):
            try:
                await self.start(role)
                return
            except MillpondError as failed:
                error = failed
        _log.error("no %s worker starts any more: %s", role, error)
        starting = any(one.role == role for one in self._starting.values())
        if not self.able(role) and not starting:
            self._listener.role_failed(role, error)


def _in_codes(mark: str | None) -> str:
    return "as they are" if mark is None else f"in codes of {mark}"


async def _end(handle: WorkerHandle) -> None:
    """Let a worker end by itself, or end its process."""
    with contextlib.suppress(TimeoutError, MillpondError):
        await asyncio.wait_for(handle.close(), _CLOSE_S)
    handle.kill()
