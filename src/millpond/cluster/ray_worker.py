"""RayWorker: an `EngineWorker` in a process that Ray starts, and the private or existing Ray it runs in."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar, TypeVarTuple

import numpy as np

from millpond.cluster.handle import WorkerLostError
from millpond.cluster.messages import StartMessage, WorkerReport
from millpond.cluster.settings import ClusterSettings
from millpond.cluster.worker import EngineWorker
from millpond.engine.async_llm import AsyncLLM
from millpond.engine.cluster_figures import Role
from millpond.engine.outputs import CacheSnapshot
from millpond.engine.request import CacheOptions, Request
from millpond.errors import MillpondError, OptionError
from millpond.optional import require


class LocalProcess:
    """A process by the kernel's handle of it, which no later process of the same number has.

    Args:
        pid: Id of a process that runs on this machine. Where the system has no such handles, or it has ended, `kill`
            does nothing.
    """

    def __init__(self, pid: int) -> None:
        self._handle: int | None = None
        if hasattr(os, "pidfd_open"):
            with suppress(OSError):
                self._handle = os.pidfd_open(pid)

    def kill(self) -> None:
        """End it at once; one that has ended is no error."""
        handle, self._handle = self._handle, None
        if handle is not None:
            with suppress(OSError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
            os.close(handle)


T = TypeVar("T")
Args = TypeVarTuple("Args")

#: Calls of one worker that may run at a time; all but those that wait for reports are short.
_CALLS = 10_000
#: Seconds in which a worker has a place and its model.
START_S = 900.0


class _Actor(EngineWorker):
    """Engine worker in Ray's process."""

    async def node(self) -> str:
        """Return the id of the machine in Ray."""
        ray: Any = require("ray", "cluster", "a worker")
        return str(ray.get_runtime_context().get_node_id())


class RayWorker:
    """Worker in a process of Ray; see `WorkerHandle`.

    Args:
        ray: The module, connected.
        name: Name of the worker.
        role: Role of the worker.
        model: As of `EngineWorker`.
        options: As of `EngineWorker`.
        settings: As of `EngineWorker`.
    """

    def __init__(
        self, ray: Any, name: str, role: Role, model: str, options: Mapping[str, Any], settings: ClusterSettings
    ) -> None:
        self.name, self.role = name, role
        self.pid, self.node = 0, ""
        self._ray, self._hang_s = ray, settings.hang_s
        self._process: LocalProcess | None = None  # where it runs on this machine
        # on a Ray of this process workers share its cores, however many there are; elsewhere Ray places them by CPUs
        cpus = 0 if settings.address is None else 1
        actor = ray.remote(_Actor).options(num_cpus=cpus, max_restarts=0, max_concurrency=_CALLS)
        self._actor = actor.remote(model, dict(options), role, settings)

    async def open(self) -> tuple[int, int, CacheOptions, str | None]:
        """See `WorkerHandle`."""
        try:
            opened = await asyncio.wait_for(self._wait(self._actor.open.remote()), START_S)
        except TimeoutError:
            raise MillpondError(
                f"worker {self.name} has not started after {START_S:g} seconds: Ray has no free CPU for it, or loading "
                "the model takes longer; ask for fewer workers, or add machines"
            ) from None
        self.pid, context, vocabulary, cache, codes = opened
        self.node = await self._wait(self._actor.node.remote())
        if self.node == str(self._ray.get_runtime_context().get_node_id()):
            self._process = LocalProcess(self.pid)
        return context, vocabulary, cache, codes

    async def start(self, starts: Sequence[StartMessage]) -> None:
        """See `WorkerHandle`."""
        await self._wait(self._actor.start.remote(starts))

    async def report(self, wanted: frozenset[str]) -> WorkerReport:
        """See `WorkerHandle`."""
        try:
            report: WorkerReport = await asyncio.wait_for(self._wait(self._actor.report.remote(wanted)), self._hang_s)
        except TimeoutError:
            raise WorkerLostError(f"no answer in {self._hang_s:g} seconds") from None
        return report

    async def offer(self, name: str) -> int | None:
        """See `WorkerHandle`."""
        n_bytes: int | None = await self._wait(self._actor.offer.remote(name))
        return n_bytes

    async def cancel(self, name: str) -> None:
        """See `WorkerHandle`."""
        await self._wait(self._actor.cancel.remote(name))

    def offered(self, name: str) -> Any:
        """Return a reference, so that the bytes go from process to process; see `WorkerHandle`.

        They do not go through this process.
        """
        return self._actor.fetch.remote(name)

    async def take(self, name: str, offered: Any) -> None:
        """See `WorkerHandle`."""
        taken = self._actor.take.remote(name, offered)
        del offered  # an error that is raised here refers to this frame, and would keep the bytes in Ray's store
        await self._wait(taken)

    async def checkpoint(self, name: str) -> bytes | None:
        """See `WorkerHandle`: a copy, so that Ray's store is free of it at once."""
        data = await self._wait(self._actor.checkpoint.remote(name))
        return None if data is None else bytes(data)

    async def resume(self, request: Request, data: bytes) -> None:
        """See `WorkerHandle`."""
        await self._wait(self._actor.resume.remote(request, np.frombuffer(data, dtype=np.uint8)))

    async def release(self, name: str) -> None:
        """See `WorkerHandle`."""
        await self._wait(self._actor.release.remote(name))

    async def memory(self, name: str, layer: int) -> CacheSnapshot | None:
        """See `WorkerHandle`."""
        snapshot: CacheSnapshot | None = await self._wait(self._actor.memory.remote(name, layer))
        return snapshot

    async def call(self, function: Callable[[AsyncLLM, *Args], Awaitable[T]], *args: *Args) -> T:
        """Await a function in the other process; see `WorkerHandle`.

        The function goes there as its name, its arguments as bytes.
        """
        result: T = await self._wait(self._actor.call.remote(function, *args))
        return result

    async def close(self) -> None:
        """See `WorkerHandle`."""
        await self._wait(self._actor.close.remote())

    def kill(self) -> None:
        """End the process; see `WorkerHandle`.

        Ray alone lets a frozen process continue for five seconds, with its memory.
        """
        self._ray.kill(self._actor)
        if self._process is not None:
            self._process.kill()

    async def _wait(self, reference: Any) -> Any:
        """Return the result of a call, with the errors of this package as they were raised there."""
        errors = self._ray.exceptions
        try:
            return await _awaited(reference)
        except MillpondError as error:
            raise _cause(error) from None
        except errors.RayTaskError as error:
            cause = _cause(error)
            if isinstance(cause, MillpondError):
                raise cause from None
            if isinstance(cause, errors.RayError):  # what it was given cannot be read any more
                raise WorkerLostError(f"worker {self.name}: {type(cause).__name__}") from error
            raise MillpondError(f"worker {self.name} failed: {cause!r}") from error
        except errors.RayError as error:
            raise WorkerLostError(f"worker {self.name} is gone: {type(error).__name__}") from error


def _cause(error: BaseException) -> Exception:
    """Return what was raised in the worker: Ray wraps it."""
    cause = getattr(error, "cause", None)
    return (
        cause if isinstance(cause, Exception) else error if isinstance(error, Exception) else RuntimeError(str(error))
    )


def _awaited(reference: Any) -> Coroutine[Any, Any, Any]:
    async def wait() -> Any:
        return await reference

    return wait()


#: Addresses of this machine; others need a token, since whoever reaches Ray runs code there.
_LOCAL = ("auto", "local", "localhost", "127.0.0.1", "[::1]")
#: Bytes of the object store besides what waits to be moved: Ray takes no fewer.
_STORE = 96 * 2**20


class _Connection:
    """A Ray to which this process is connected for sessions, and those that still use it.

    Attributes:
        address: Address as it was given.
        folder: Folder with the files of a private one.
    """

    def __init__(self, address: str | None, folder: str | None) -> None:
        self.address, self.folder = address, folder
        self.users: set[RaySession] = set()


#: A process has one connection to Ray at most; `_lock` guards it.
_lock = threading.Lock()
_connection: _Connection | None = None


class RaySession:
    """Ray for the workers of one cluster.

    A process is connected to one Ray at most: clusters of one process share it, and the last one that closes ends it.

    Args:
        address: Address of a running Ray ("auto": that of this machine); None: one of this process.
        n_workers: CPUs that a Ray of its own offers, one for each worker.
        n_bytes: Most bytes that are on their way at a time.

    Raises:
        OptionError: Ray is not installed, cannot be reached, or is on another machine and asks for no token; or the
            process has clusters at another address.
    """

    def __init__(self, address: str | None, n_workers: int, n_bytes: int) -> None:
        self.ray: Any = require("ray", "cluster", "a cluster of several engines")
        if address is not None:
            check_address(address)
        self._connection: _Connection | None = None
        with _lock:
            self._join(address, n_workers, n_bytes)

    def _join(self, address: str | None, n_workers: int, n_bytes: int) -> None:
        global _connection
        if not self.ray.is_initialized():
            _connection = _connected(self.ray, address, n_workers, n_bytes)
        elif _connection is None:
            return  # whoever connected this process to Ray ends that too
        elif _connection.address != address:
            have, want = (where or "a private one" for where in (_connection.address, address))
            raise OptionError(
                f"this process has clusters on one Ray ({have}) and cannot have others on another ({want}): give all "
                "the same address=, or close those first"
            )
        self._connection = _connection
        self._connection.users.add(self)

    def close(self) -> None:
        """Leave Ray; the last cluster of this process ends a private one, with its files."""
        global _connection
        with _lock:
            connection = self._connection
            if connection is None or self not in connection.users:
                return
            connection.users.remove(self)
            if connection.users:
                return
            if _connection is connection:  # else it was ended by others, and there is another one
                _connection = None
                self.ray.shutdown()
            _remove(connection.folder)


def _connected(ray: Any, address: str | None, n_workers: int, n_bytes: int) -> _Connection:
    """Connect to a running Ray, or start one.

    Raises:
        OptionError: Ray cannot be reached.
    """
    options: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
    folder: str | None = None
    if address is None:
        folder = tempfile.mkdtemp(prefix="millpond-ray-")
        options |= {
            "address": "local",
            "num_cpus": n_workers,
            "include_dashboard": False,
            "_temp_dir": folder,
            "object_store_memory": _STORE + 2 * n_bytes,
            "_system_config": {"worker_niceness": 0},
        }
    else:
        options["address"] = address
    try:
        ray.init(**options)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        _remove(folder)
        raise OptionError(f"Ray cannot be reached at {address or 'this machine'}: {error}") from error
    return _Connection(address, folder)


def _remove(folder: str | None) -> None:
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


def check_address(address: str) -> None:
    """Check that a Ray on another machine asks for a token.

    Raises:
        OptionError: an address of another machine without token authentication.
    """
    host = address.removeprefix("ray://").rpartition(":")[0] or address
    if host not in _LOCAL and os.environ.get("RAY_AUTH_MODE") != "token":
        raise OptionError(
            f"address={address!r} is another machine, and whoever reaches Ray there runs code: set RAY_AUTH_MODE=token "
            "and the cluster's token on all machines, or use address='auto' on one of them"
        )
