"""BatchedCalls: calls from tasks into the loop of a cluster, made together where the tasks make them together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from millpond.cluster.loop_thread import LoopThread

T = TypeVar("T")


@dataclass(slots=True)
class _Call:
    function: Callable[[], Any]
    answer: asyncio.Future[Any]
    result: Any = None
    error: Exception | None = None


class BatchedCalls:
    """Calls into one loop, safe to use from any other loops. Requests that are sent at once arrive together so."""

    def __init__(self, loop: LoopThread) -> None:
        self._loop = loop
        self._waiting: dict[asyncio.AbstractEventLoop, list[_Call]] = {}  # each touched by its own loop only

    async def call(self, function: Callable[[], T]) -> T:
        """Call a function in the loop, and return what it returns.

        Cancelled in the pass in which it was made, it is not called at all.

        Raises:
            Exception: what the function raises.
        """
        here = asyncio.get_running_loop()
        call = _Call(function, here.create_future())
        if here not in self._waiting:
            self._waiting[here] = []
            here.call_soon(self._send, here)
        self._waiting[here].append(call)
        result: T = await call.answer
        return result

    def _send(self, here: asyncio.AbstractEventLoop) -> None:
        calls = [call for call in self._waiting.pop(here) if not call.answer.cancelled()]
        if calls:
            self._loop.call(lambda: _make(calls, here))


def _make(calls: Sequence[_Call], home: asyncio.AbstractEventLoop) -> None:
    for call in calls:
        try:
            call.result = call.function()
        except Exception as error:
            call.error = error
    try:
        home.call_soon_threadsafe(_answer, calls)
    except RuntimeError:  # that loop is closed, and nothing waits there any more
        return


def _answer(calls: Sequence[_Call]) -> None:
    for call in calls:
        if call.answer.cancelled():
            continue
        if call.error is not None:
            call.answer.set_exception(call.error)
        else:
            call.answer.set_result(call.result)
