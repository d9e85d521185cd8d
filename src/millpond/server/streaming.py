"""Streams from the engine to a client: several merged into one, until the client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from millpond.engine.outputs import RequestOutput
from millpond.engine.request import Request
from millpond.server.llm_protocol import ServedLLM

T = TypeVar("T")


class ClientGone(Exception):
    """The client closed its connection before its answer was complete."""


async def merge_streams(llm: ServedLLM, requests: Sequence[Request]) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """The outputs of all requests as they come, each with its request's place; closing it cancels what still runs."""
    if len(requests) == 1:
        async with aclosing(llm.stream(requests[0])) as outputs:
            async for output in outputs:
                yield 0, output
        return
    queue: asyncio.Queue[tuple[int, RequestOutput | Exception | None]] = asyncio.Queue(1)

    async def follow(place: int, request: Request) -> None:
        ended = None
        try:
            async with aclosing(llm.stream(request)) as outputs:
                async for output in outputs:
                    await queue.put((place, output))
        except Exception as error:  # raised where it is read
            ended = error
        await queue.put((place, ended))

    tasks = [asyncio.create_task(follow(place, request)) for place, request in enumerate(requests)]
    left = len(tasks)
    try:
        while left:
            place, found = await queue.get()
            if isinstance(found, Exception):
                raise found
            if found is None:
                left -= 1
            else:
                yield place, found
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def while_connected(receive: Receive, wanted: Awaitable[T]) -> T:
    """The result of `wanted`, unless the client goes away before: then it is cancelled.

    Raises:
        ClientGone: it went.
    """
    work = asyncio.ensure_future(wanted)
    gone = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            gone.result()
            raise ClientGone
        return work.result()
    finally:
        work.cancel()
        gone.cancel()
        await asyncio.gather(work, gone, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events. When they end, and when the client goes away, `events` and their `source` are closed.

    Args:
        left: called when the client goes away.
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncGenerator[str, None], source: AsyncGenerator[Any, None], left: Callable[[], None]
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._left = left
        self._source = source  # which closing events that never began would leave open

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with aclosing(self._source), aclosing(self._events):
                await while_connected(receive, self._send(send))
        except (ClientGone, OSError):  # the client is gone
            self._left()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for event in self._events:
            await send({"type": "http.response.body", "body": event.encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
