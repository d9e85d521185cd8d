"""EngineWorker: one engine, reports of its requests, and requests as bytes until another worker fetches them."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar, TypeVarTuple

import numpy as np
import numpy.typing as npt

from millpond.cluster.messages import ReportedOutput, RequestDelta, StartMessage, WorkerReport, failed
from millpond.cluster.settings import ClusterSettings
from millpond.engine.async_llm import AsyncLLM
from millpond.engine.cluster_figures import Role
from millpond.engine.engine import Engine
from millpond.engine.outputs import CacheSnapshot, RequestOutput
from millpond.engine.request import CacheOptions, Request
from millpond.errors import MillpondError, OptionError, PoolFullError


class HandoffGoneError(MillpondError):
    """Bytes of a request are not held any more, so it has to be restarted."""


class HandoffBuffer:
    """Bytes of requests by name, within a limit, each for as long as it is wanted.

    Its methods may be called in any thread.

    Args:
        limit: Most bytes that are held or reserved.
        lease_s: Seconds after which bytes are dropped that `keep` did not name.
        clock: Clock of the leases, in seconds.
    """

    def __init__(self, limit: int, lease_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit, self._lease_s, self._clock = limit, lease_s, clock
        self._reserved: dict[str, int] = {}
        self._held: dict[str, bytes] = {}
        self._until: dict[str, float] = {}
        self._lock = threading.RLock()

    def __contains__(self, name: str) -> bool:
        return name in self._held

    @property
    def size(self) -> int:
        """Bytes that are held or reserved."""
        with self._lock:
            return sum(self._reserved.values()) + sum(map(len, self._held.values()))

    def reserve(self, name: str, n_bytes: int) -> bool:
        """Reserve bytes for a request that is about to be packed; False: there is no room."""
        with self._lock:
            self.drop_lapsed()
            if name in self._reserved or name in self._held:
                return False
            if self.size + n_bytes > self._limit:
                return False
            self._reserved[name] = n_bytes
            return True

    def put(self, name: str, data: bytes) -> bool:
        """Store a request's bytes in place of the reserved ones; False: they are too many."""
        with self._lock:
            self._reserved.pop(name, None)
            if self.size + len(data) > self._limit:
                return False
            self._held[name] = data
            self._until[name] = self._clock() + self._lease_s
            return True

    def fetch(self, name: str) -> bytes:
        """Return the bytes of a request; they stay.

        Raises:
            HandoffGoneError: they were fetched and released, or not wanted for too long.
        """
        with self._lock:
            if name not in self._held:
                raise HandoffGoneError(f"no request {name!r} waits to be taken over: begin it again")
            return self._held[name]

    def keep(self, names: Iterable[str]) -> None:
        """Prolong the leases of requests that are still wanted."""
        with self._lock:
            until = self._clock() + self._lease_s
            for name in names:
                if name in self._held:
                    self._until[name] = until

    def drop(self, name: str) -> None:
        """Free the bytes of a request, or what is reserved for it; none is no error."""
        with self._lock:
            self._reserved.pop(name, None)
            self._held.pop(name, None)
            self._until.pop(name, None)

    def drop_lapsed(self) -> list[str]:
        """Free what was not wanted for `lease_s` seconds; returns the names."""
        with self._lock:
            now = self._clock()
            names = [name for name, until in self._until.items() if until <= now]
            for name in names:
                self.drop(name)
            return names

    def clear(self) -> None:
        """Free everything."""
        with self._lock:
            for name in [*self._reserved, *self._held]:
                self.drop(name)


T = TypeVar("T")
Args = TypeVarTuple("Args")

#: A report comes after this many seconds even if nothing is new.
HEARTBEAT_S = 0.5
#: Seconds before a request is packed in the engine's thread: the event loop, which tells of the step, is to have
#: Python's lock first.
_LOOP_S = 0.001
#: Bytes to send of a request, at most: as a multiple of those in its pages, and besides.
BYTES_FACTOR, BYTES_BESIDES = 1.25, 2**16


@dataclass(frozen=True, slots=True)
class _Leaving:
    """Request that has left its engine for another one.

    Attributes:
        output: Its last output here.
        data: Its bytes, which may still be coded.
        n_bytes: Bytes in its pages.
    """

    output: RequestOutput
    data: Future[bytes]
    n_bytes: int


class EngineWorker:
    """One engine of a cluster; all its methods run in one event loop.

    Args:
        model: As of `AsyncLLM`.
        options: The rest of its arguments.
        role: See `Role`. Where there is no room for a request of a prefill worker, it decodes here until there is.
        settings: Bytes and seconds for which requests may wait for others to take them over; seconds after which
            reports say that the engine hangs.
    """

    def __init__(self, model: Any, options: Mapping[str, Any], role: Role, settings: ClusterSettings) -> None:
        self._model, self._options = model, options
        self._role, self._step_limit_s = role, settings.hang_s
        self._handoff = HandoffBuffer(settings.handoff_bytes, settings.lease_s)
        self._opened: AsyncLLM | None = None
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._newest: dict[str, RequestOutput | RequestDelta] = {}  # what no report had yet
        self._reported: dict[str, ReportedOutput] = {}
        self._sizes: dict[str, int] = {}  # bytes in the pages of each request
        self._more = BYTES_FACTOR
        self._cancelled: set[str] = set()
        self._staying: set[str] = set()  # requests that are not offered to other workers
        self._left: dict[str, _Leaving | RequestDelta] = {}  # those that the engine's thread let go
        self._news = asyncio.Event()

    async def open(self) -> tuple[int, int, int, CacheOptions, str | None]:
        """Load the model, and begin.

        Returns:
            Id of the process, context length, vocabulary, how caches are kept where a request does not say, and the
            mark of the codes in which they move (None: as they are).

        Raises:
            OptionError, BudgetError, UnsupportedModelError: as `AsyncLLM`.
        """
        self._opened = AsyncLLM(self._model, **self._options)
        if self._role == "prefill":
            self._opened.leave = self._leave
        llm = self._llm
        return os.getpid(), llm.context_length, llm.vocab_size, llm.cache, llm.codes

    async def start(self, starts: Sequence[StartMessage]) -> None:
        """Take requests in; reports say what becomes of each, or why it is refused."""
        for start in starts:
            name = start.request.request_id
            if start.stays:
                self._staying.add(name)
            self._follow(name, self._llm.stream(start.request))

    async def report(self, wanted: frozenset[str]) -> WorkerReport:
        """Return what is new of all requests; wait until something is, but not for long.

        Args:
            wanted: Names of requests whose bytes have to stay until they are fetched; others are dropped after a while.
        """
        self._handoff.keep(wanted)
        self._handoff.drop_lapsed()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._news.wait(), HEARTBEAT_S)
        self._news.clear()
        newest, self._newest = self._newest, {}
        now = time.monotonic()
        updates = [
            one if isinstance(one, RequestDelta) else self._reported.setdefault(name, ReportedOutput()).update(one, now)
            for name, one in newest.items()
        ]
        for update in updates:
            if update.finished or update.dropped or update.offered is not None:  # nothing more comes of it here
                self._reported.pop(update.name, None)
        trouble = self._llm.trouble(self._step_limit_s)
        llm = self._llm
        return WorkerReport(tuple(updates), llm.stats(), trouble, self._handoff.size, llm.step_age_s, llm.busy_s)

    async def cancel(self, name: str) -> None:
        """End a request, or drop one that waits for another worker; no report follows.

        One that is not there is no error.
        """
        task = self._tasks.get(name)
        if task is not None:
            self._cancelled.add(name)  # it may be on its way out of the engine
            task.cancel()  # or on its way into it
            await asyncio.wait({task})
        await self._llm.cancel(name)  # from here on it is not in the engine
        self._handoff.drop(name)
        self._left.pop(name, None)
        self._newest.pop(name, None)
        self._reported.pop(name, None)

    async def offer(self, name: str) -> int | None:
        """Let a request that has an answer wait for another worker, whatever the role of this one.

        Returns:
            Its bytes; None: it has ended, cannot move, or there is no room for its bytes now, and it is as it was.

        Raises:
            HandoffGoneError: it left the engine and could not be kept.
        """
        if name not in self._tasks or name not in self._sizes:
            return None
        data = await self._pack(name)
        if data is None:
            return None
        self._newest.pop(name, None)
        self._reported.pop(name, None)
        return len(data)

    async def fetch(self, name: str) -> npt.NDArray[np.uint8]:
        """Return the bytes of a request that waits for another worker; they stay until `release`.

        Raises:
            HandoffGoneError: no such request waits.
        """
        return np.frombuffer(self._handoff.fetch(name), dtype=np.uint8)

    async def release(self, name: str) -> None:
        """Free the bytes of a request that another worker has."""
        self._handoff.drop(name)

    async def take(self, name: str, data: npt.NDArray[np.uint8]) -> None:
        """Continue a request out of the bytes of another worker.

        Raises:
            MillpondError: see `Engine.import_request`; nothing is left behind.
        """
        self._follow(name, await self._llm.import_request(np.ascontiguousarray(data).data))

    async def checkpoint(self, name: str) -> npt.NDArray[np.uint8] | None:
        """Return a copy of a request that decodes here and continues; None: there is none now.

        Raises:
            OptionError: it cannot be copied, now or later; see `Engine.checkpoint`.
        """
        data = await self._llm.checkpoint(name)
        return None if data is None else np.frombuffer(data, dtype=np.uint8)

    async def resume(self, request: Request, data: npt.NDArray[np.uint8]) -> None:
        """Continue a request from a copy, with its current name, known tokens and deadline.

        Raises:
            MillpondError: see `Engine.import_request`; nothing is left behind.
        """
        outputs = await self._llm.import_request(np.ascontiguousarray(data).data, request)
        self._follow(request.request_id, outputs)

    async def memory(self, name: str, layer: int) -> CacheSnapshot | None:
        """See `AsyncLLM.memory`."""
        return await self._llm.memory(name, layer)

    async def call(self, function: Callable[[AsyncLLM, *Args], Awaitable[T]], *args: *Args) -> T:
        """Await a function of the owner's with this worker's `AsyncLLM`, in its event loop.

        Requests continue meanwhile.

        Args:
            function: An async one; `AsyncLLM.call` takes it on to the engine.
            *args: Passed after the `AsyncLLM`.
        """
        return await function(self._llm, *args)

    async def close(self) -> None:
        """End all requests and give all memory back."""
        await self._llm.close(drain=False)
        for task in list(self._tasks.values()):
            task.cancel()
        self._handoff.clear()

    # ------------------------------------------------------------------ requests

    @property
    def _llm(self) -> AsyncLLM:
        assert self._opened is not None, "a worker is opened first"
        return self._opened

    def _follow(self, name: str, outputs: AsyncGenerator[RequestOutput, None]) -> None:
        task = asyncio.get_running_loop().create_task(self._run(name, outputs))
        self._tasks[name] = task
        task.add_done_callback(lambda _: self._ended(name))

    def _ended(self, name: str) -> None:
        self._tasks.pop(name, None)
        self._sizes.pop(name, None)
        self._cancelled.discard(name)
        self._staying.discard(name)

    async def _run(self, name: str, outputs: AsyncGenerator[RequestOutput, None]) -> None:
        try:
            async with aclosing(outputs):
                async for output in outputs:
                    self._tell(name, output)
                    if (n_bytes := _bytes_of(output)) is not None:
                        self._sizes[name] = n_bytes
            left = self._left.pop(name, None)
            if isinstance(left, RequestDelta):
                self._tell(name, left)
            elif left is not None:
                await self._offer(name, left)
        except Exception as error:  # whatever it is, the one who waits must hear of it
            self._tell(name, failed(name, error))

    async def _offer(self, name: str, leaving: _Leaving) -> None:
        """Store the bytes of a request that has left, once they are there, and tell of them."""
        try:
            data = await asyncio.wrap_future(leaving.data)
        except BaseException:
            self._handoff.drop(name)
            raise
        if not self._keep(name, data, leaving.n_bytes):
            return self._tell(name, RequestDelta(name, dropped=True))
        update = self._reported.setdefault(name, ReportedOutput()).update(leaving.output, time.monotonic())
        self._tell(name, replace(update, offered=len(data)))

    def _tell(self, name: str, news: RequestOutput | RequestDelta) -> None:
        self._newest[name] = news
        self._news.set()

    def _leave(self, engine: Engine, output: RequestOutput) -> bool:
        """Offer a request to other workers after its prompt, in the engine's thread.

        Right after the step a request whose prompt was read turns into bytes for another worker, if there is room for
        them. A pass later it would have decoded here, and held up the prompts.
        """
        name, n_bytes = output.request_id, _bytes_of(output)
        if name in self._staying or name not in self._tasks or n_bytes is None or not self._room_for(name, n_bytes):
            return False
        time.sleep(_LOOP_S)
        try:
            self._left[name] = _Leaving(output, engine.begin_export(name), n_bytes)
        except (OptionError, PoolFullError):  # it cannot move, or not now: it goes on here
            self._handoff.drop(name)
            return False
        except Exception as error:
            self._handoff.drop(name)
            engine.cancel(name)
            self._left[name] = failed(name, error)
        return True

    def _room_for(self, name: str, n_bytes: int) -> bool:
        """Set bytes aside for a request with as many in its pages."""
        return self._handoff.reserve(name, int(self._more * n_bytes) + BYTES_BESIDES)

    def _keep(self, name: str, data: bytes, n_bytes: int) -> bool:
        """Store a request's bytes for another worker; False: there were too many for the room."""
        kept = self._handoff.put(name, data)
        if not kept:
            self._more = max(self._more, len(data) / max(n_bytes, 1))  # the next one of its kind decodes here
        return kept

    async def _pack(self, name: str) -> bytes | None:
        """Return the bytes of a request, which has left the engine and waits; None: it is there.

        Raises:
            HandoffGoneError: it was cancelled meanwhile, or its bytes were more than expected and had no room.
            MillpondError: see `Engine.export_request`.
        """
        n_bytes = self._sizes[name]
        if not self._room_for(name, n_bytes):
            return None
        try:
            data = await self._llm.export_request(name)
        except BaseException as error:
            self._handoff.drop(name)
            if isinstance(error, OptionError | PoolFullError):  # it has ended, or cannot move now: it goes on here
                return None
            raise
        if name in self._cancelled:
            self._handoff.drop(name)
            raise HandoffGoneError(f"request {name!r} was cancelled on its way")
        if not self._keep(name, data, n_bytes):
            raise HandoffGoneError(f"request {name!r} takes {len(data):,} bytes, for which there is no room")
        return data


def _bytes_of(output: RequestOutput) -> int | None:
    """Return the bytes in a request's pages; None: not all of its answers have begun."""
    if not all(one.token_ids for one in output.completions):
        return None
    return sum(one.kv.kv_bytes for one in output.completions if one.kv is not None)
