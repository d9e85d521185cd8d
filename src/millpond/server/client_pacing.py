"""Pacing of clients: a bounded share of time for work in front of the engine.

Requests are read, checked and answered in the interpreter that steps the engine, so what one client's bodies take is
missing in the tokens of all others. So every request is measured, in CPU seconds of its task and of the threads that
work for it, and what it took is waited for several times over before the next one continues, while answers of other
clients are in flight: that of the client with the least service.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator
from concurrent.futures import Executor
from contextvars import ContextVar
from typing import Any, TypeVar

from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from millpond.engine.fairness import ClientService, FairQueue
from millpond.server.identity import ClientRegistry

T = TypeVar("T")

#: Seconds of waiting per second that a request took: other clients' requests take at most a sixth of the time.
PAID_BACK = 5.0
#: Seconds for which a client counts as answered after its last answer: a chat continues soon.
RECENT_S = 0.25
#: Seconds that the server takes to receive a byte of a body, about; and bytes after which a body waits for its turn.
_BYTE_S, _SLICE = 2e-8, 2**18
#: Seconds between two checks of the queue.
_CHECK_S = 1e-3
#: Seconds that may be owed at most, so that one request that took long does not shut the door.
_MAX_OWED_S = 2.0


class ClientPacing:
    """Choice of the request that may continue in front of the engine, and when.

    Args:
        answered: Returns the clients whose answers are in flight.
    """

    def __init__(self, answered: Callable[[], set[str]]) -> None:
        self._answered = answered
        self._clients = FairQueue()
        self._recent: dict[str, float] = {}  # when clients were last seen to be answered
        self._waiting: list[tuple[ClientService, asyncio.Future[None]]] = []
        self._free_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def enter(self, name: str) -> PacedRequest:
        """Add a request; `PacedRequest.leave` removes it when it is answered."""
        return PacedRequest(self, name, self._clients.add_request(name))

    def leave(self, client: ClientService) -> None:
        """Remove an answered request."""
        self._clients.remove_request(client)

    def charge(self, name: str, client: ClientService, seconds: float) -> None:
        """Charge a client with the CPU seconds of a request."""
        client.served += round(1e6 * seconds)
        if self._others(name):
            now = time.monotonic()
            self._free_at = min(max(now, self._free_at) + PAID_BACK * seconds, now + _MAX_OWED_S)

    async def wait_turn(self, name: str, client: ClientService) -> None:
        """Wait until a request may continue; the least served client goes first."""
        if not self._others(name) or (time.monotonic() >= self._free_at and not self._waiting):
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((client, turn))
        if self._timer is None:
            self._plan()
        await turn

    def _others(self, name: str) -> bool:
        """Whether another client is answered, or was just now."""
        now = time.monotonic()
        self._recent.update(dict.fromkeys(self._answered(), now))
        self._recent = {one: seen for one, seen in self._recent.items() if now - seen < RECENT_S}
        return any(one != name for one in self._recent)

    def _plan(self) -> None:
        wait = max(_CHECK_S, self._free_at - time.monotonic())
        self._timer = asyncio.get_running_loop().call_later(wait, self._admit_next)

    def _admit_next(self) -> None:
        """Admit the next waiting request; one at a time, since its cost is not known beforehand."""
        self._timer = None
        self._waiting = [one for one in self._waiting if not one[1].done()]
        if self._waiting and time.monotonic() >= self._free_at:
            first = min(self._waiting, key=lambda one: one[0].queue_key)
            self._waiting.remove(first)
            first[1].set_result(None)
        if self._waiting:
            self._plan()


class PacedRequest:
    """One request in front of the engine."""

    def __init__(self, pacing: ClientPacing, name: str, client: ClientService) -> None:
        self._pacing = pacing
        self._name = name
        self._client = client

    def charge(self, seconds: float) -> None:
        """Charge the request's client with CPU seconds."""
        self._pacing.charge(self._name, self._client, seconds)

    async def wait_turn(self) -> None:
        """Wait until it may continue."""
        await self._pacing.wait_turn(self._name, self._client)

    def leave(self) -> None:
        """Remove the request, which is answered."""
        self._pacing.leave(self._client)


_PACED: ContextVar[PacedRequest | None] = ContextVar("paced_request", default=None)


async def in_thread(executor: Executor, work: Callable[..., T], *args: Any) -> T:
    """Return the result of `work`, run in a thread when this task's request has its turn.

    The request pays for the time that it takes.
    """
    paced = _PACED.get()
    if paced is None:
        return await asyncio.get_running_loop().run_in_executor(executor, work, *args)
    took = 0.0

    def timed() -> T:
        nonlocal took
        began = time.thread_time()
        try:
            return work(*args)
        finally:
            took = time.thread_time() - began

    await paced.wait_turn()
    try:
        return await asyncio.get_running_loop().run_in_executor(executor, timed)
    finally:
        paced.charge(took)


class ClientPacingMiddleware:
    """Lets requests in, and their bodies, as their client's turn comes.

    Args:
        app: The app.
        pacing: Order of the requests.
        clients: Clients of the server.
        open_paths: Paths that are answered at once.
    """

    def __init__(self, app: ASGIApp, pacing: ClientPacing, clients: ClientRegistry, open_paths: frozenset[str]) -> None:
        self._app = app
        self._pacing = pacing
        self._clients = clients
        self._open = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._open:
            await self._app(scope, receive, send)
            return
        paced = self._pacing.enter(self._clients.of(HTTPConnection(scope)).name)
        before = _PACED.set(paced)

        n_bytes = 0

        async def receive_paced() -> Message:
            nonlocal n_bytes
            message = await receive()
            n_bytes += len(message.get("body", b""))
            if n_bytes >= _SLICE:
                paced.charge(_BYTE_S * n_bytes)
                n_bytes = 0
                await paced.wait_turn()
            return message

        try:
            await paced.wait_turn()
            await _Timed(self._app(scope, receive_paced, send), paced.charge)
        finally:
            _PACED.reset(before)
            paced.leave()


class _Timed:
    """Awaits a coroutine and says after each of its parts how many CPU seconds that took.

    What runs in tasks that it makes, such as the events of a stream, is not counted.
    """

    def __init__(self, work: Awaitable[None], charge: Callable[[float], None]) -> None:
        assert isinstance(work, Coroutine), "an app is an async function"
        self._work: Coroutine[Any, Any, None] = work
        self._charge = charge

    def __await__(self) -> Generator[Any, Any, None]:
        work, error, value = self._work, None, None
        while True:
            began = time.thread_time()
            try:
                awaited = work.send(value) if error is None else work.throw(error)
            except StopIteration:
                return
            finally:
                self._charge(time.thread_time() - began)
            error = None
            try:
                value = yield awaited
            except BaseException as thrown:
                error = thrown
