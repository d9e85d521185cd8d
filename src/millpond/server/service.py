"""Runs a request from its parsed body to an answer, whole, or streamed until the client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, TypeVar

from fastapi import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from millpond.engine.outputs import RequestOutput
from millpond.engine.request import Request
from millpond.errors import MillpondError
from millpond.option_files import listed_files
from millpond.server.admission import AdmissionControl
from millpond.server.answers import ApiCall
from millpond.server.body_parsing import JsonBodies
from millpond.server.client_pacing import ClientPacing
from millpond.server.errors import FAILED, ApiError
from millpond.server.identity import Client, ClientRegistry
from millpond.server.image_worker import ImageWorker
from millpond.server.llm_protocol import ServedLLM
from millpond.server.metrics import Metrics
from millpond.server.prompt_marks import ChatBreakpoints
from millpond.server.request_log import FINISHED
from millpond.server.settings import ServerSettings
from millpond.server.tokenizer_worker import TokenizerWorker
from millpond.server.tools.tool_choice import format_of

T = TypeVar("T")


class ClientGone(Exception):
    """The client closed its connection before its answer was complete."""


async def merge_streams(llm: ServedLLM, requests: Sequence[Request]) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Yield the outputs of all requests as they come, each with its request's index.

    Closing it cancels what still runs.
    """
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
    unfinished = len(tasks)
    try:
        while unfinished:
            place, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                unfinished -= 1
            else:
                yield place, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def while_connected(receive: Receive, answer: Awaitable[T]) -> T:
    """Return the result of `answer`, and cancel it if the client goes away before.

    Raises:
        ClientGone: it went.
    """
    work = asyncio.ensure_future(answer)
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
    """Server-sent events.

    When they end, and when the client goes away, `events` and their `source` are closed.

    Args:
        events: The events.
        source: Outputs that the events are made of.
        left: Called when the client goes away.
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


#: Characters of answers from which on they are not put together in the event loop.
_LONG = 2**14
Outputs = AsyncGenerator[tuple[int, RequestOutput], None]

#: nginx's status for a client that closed its connection; it appears only in logs and metrics.
_CLIENT_GONE = 499


class Service:
    """Engine with everything in front of it.

    Attributes:
        llm: See `ServedLLM`.
        settings: See `ServerSettings`.
        tokens: See `TokenizerWorker`.
        clients: See `ClientRegistry`.
        admission: See `AdmissionControl`.
        pacing: See `ClientPacing`.
        metrics: See `Metrics`.
        images: See `ImageWorker`.
        bodies: See `JsonBodies`.
        breakpoints: See `ChatBreakpoints`.
        calls: Format of calls of tools; None: they are not read.

    Raises:
        OptionError: a file of the settings cannot be read, or there is no such parser.
    """

    def __init__(self, llm: ServedLLM, settings: ServerSettings) -> None:
        self.llm = llm
        self.settings = settings
        self.tokens = TokenizerWorker(llm)
        self.calls = format_of(settings.tool_parser, self.tokens.shown)
        self.clients = ClientRegistry(settings, None if llm.sessions is None else llm.sessions.client_secret)
        self.admission = AdmissionControl(llm, settings.max_queue, settings.step_limit_s)
        self.pacing = ClientPacing(lambda: self.admission.clients)
        self.metrics = Metrics(llm, self.admission)
        self.images = ImageWorker(llm.images, settings.image_limits)
        self.bodies = JsonBodies(settings.max_body_items)
        self._files = listed_files(settings.option_files)
        self.breakpoints = ChatBreakpoints(llm, self._files)

    def check_model(self, name: str | None) -> None:
        """Check the name of a model.

        Raises:
            ApiError: 404, another model is served.
        """
        if name is not None and name != self.llm.model_name:
            message = f"model {name[:200]!r} is not here; this server has {self.llm.model_name!r}"
            raise ApiError(404, message, "model_not_found", "model")

    async def answer(
        self, http: HttpRequest, api_call: ApiCall, enough: Callable[[RequestOutput], bool] | None = None
    ) -> Response:
        """Answer a call; a client that goes away ends it, whether it is streamed or not.

        Args:
            http: The request of HTTP.
            api_call: The call.
            enough: Whether a request, as far as it has come, may end with what it has.

        Raises:
            ApiError, MillpondError: it is refused; nothing of it is left in the engine.
        """
        client = self.clients.of(http)
        ended: list[RequestOutput] = http.scope.get(FINISHED, [])
        outputs = self._outputs(client, self.clients.with_client(client, api_call.requests), ended, enough)
        try:
            if not api_call.stream:
                async with aclosing(outputs):
                    return JSONResponse(await while_connected(http.receive, self._whole(api_call, outputs)))
            first = await while_connected(http.receive, anext(outputs))  # so that a refusal has a status of its own
        except ClientGone:
            self.metrics.left.inc()
            return Response(status_code=_CLIENT_GONE)
        return EventStream(self._events(api_call, first, outputs, http.scope), outputs, self.metrics.left.inc)

    async def _outputs(
        self,
        client: Client,
        of_client: Sequence[Request],
        ended: list[RequestOutput],
        enough: Callable[[RequestOutput], bool] | None,
    ) -> Outputs:
        """Yield the engine's outputs, from admission on; the last of each go to `ended` too."""
        requests = [replace(one, cache=replace(one.cache, files=self._files)) for one in of_client]
        with self.admission.admit([request.request_id for request in requests], client.name):
            async with aclosing(merge_streams(self.llm, requests)) as outputs:
                async for place, output in outputs:
                    if output.finished:
                        self.metrics.finished(output)
                        ended.append(output)
                        if len(requests) == 1:
                            _check_deadline(output)
                    elif enough is not None and enough(output):
                        enough = None
                        await self.llm.cancel(output.request_id)
                    yield place, output

    async def _whole(self, api_call: ApiCall, outputs: Outputs) -> dict[str, Any]:
        last = {place: output async for place, output in outputs}
        answers = [last[place] for place in range(len(api_call.requests))]
        if sum(len(one.text) for output in answers for one in output.completions) > _LONG:
            return await asyncio.to_thread(api_call.whole, self.llm.model_name, answers)
        return api_call.whole(self.llm.model_name, answers)

    async def _events(
        self, api_call: ApiCall, first: tuple[int, RequestOutput], rest: Outputs, scope: Scope
    ) -> AsyncGenerator[str, None]:
        events = api_call.events(self.llm.model_name)
        try:
            for event in events.more(*first):
                yield event
            async for place, output in rest:
                for event in events.more(place, output):
                    yield event
        except (ApiError, MillpondError) as error:  # the status is long sent
            failure = error if isinstance(error, ApiError) else ApiError.of(error)
            scope[FAILED] = failure.code
            for event in events.fail(failure):
                yield event
            return
        for event in events.end():
            yield event


def _check_deadline(output: RequestOutput) -> None:
    """Check that an answer began before its deadline.

    Raises:
        ApiError: time was up before there was anything to give.
    """
    if all(c.finish_reason == "deadline" and not c.token_ids for c in output.completions):
        message = "the deadline came before the first token"
        raise ApiError(408, message, "deadline_exceeded", headers={"Retry-After": "1"})
