"""POST /v1/chat/completions."""

from __future__ import annotations

import uuid
from typing import NamedTuple

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from starlette.responses import Response

from millpond.engine.chunks.prompt import Prompt
from millpond.engine.request import Request
from millpond.server.answers import ChatFormat, ChoicesCall
from millpond.server.body_parsing import ParsedRoute
from millpond.server.errors import ApiError
from millpond.server.prompt_marks import chat_marks
from millpond.server.request_mapping import (
    cache_options,
    check_room,
    most_tokens,
    requests,
    sampling,
    schema_of,
    wants_progress,
)
from millpond.server.schemas import ChatBody, StructuralTag, two_of
from millpond.server.service import Service
from millpond.server.text_reader import PLAIN_STOP
from millpond.server.tools.response_format import ToolCallFormat
from millpond.server.tools.tool_choice import Tools, tools_of


def routes(service: Service) -> APIRouter:
    """Return the route that answers chats."""
    router = APIRouter(route_class=ParsedRoute)

    @router.post("/v1/chat/completions", response_model=None)
    async def chat(body: ChatBody, http: HttpRequest) -> Response:
        """The next message of a chat."""
        return await service.answer(http, await call_of(service, body))

    return router


async def call_of(service: Service, body: ChatBody) -> ChoicesCall:
    """Return the call that a body asks for, checked.

    Raises:
        ApiError, OptionError: it cannot be.
    """
    name = f"chatcmpl-{uuid.uuid4().hex}"
    chat = await chat_request_of(service, body, name)
    include_usage = body.stream_options is not None and body.stream_options.include_usage
    scores = bool(body.logprobs)
    response_format = ChatFormat(scores) if chat.tools is None else ToolCallFormat(chat.tools, chat.held, scores)
    return ChoicesCall(name, chat.requests, response_format, bool(body.stream), include_usage)


class ChatRequest(NamedTuple):
    """A chat as the engine gets it.

    Attributes:
        requests: The one request.
        tools: Tools that can be called.
        held: Whether the answer follows `tools.constraint`.
    """

    requests: list[Request]
    tools: Tools | None
    held: bool


async def chat_request_of(service: Service, body: ChatBody, name: str, *, most_is_bound: bool = False) -> ChatRequest:
    """Return the engine's request of a chat, checked.

    Args:
        service: The service.
        body: Body of the request.
        name: Its id.
        most_is_bound: Fewer new tokens than `max_tokens` are no error where the context holds no more.

    Raises:
        ApiError, OptionError: it cannot be; ImageError among them.
    """
    service.check_model(body.model)
    service.tokens.check_fields(body)
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs=true", "invalid_value", "top_logprobs")
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        message = f"max_tokens={body.max_tokens} and max_completion_tokens={body.max_completion_tokens}: give one"
        raise ApiError(400, message, "invalid_value", "max_tokens")
    requested_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if requested_tokens == 0:
        raise ApiError(400, "max_tokens=0: must be at least 1", "invalid_value", "max_tokens")
    max_tokens = most_tokens(requested_tokens, service.settings.max_tokens)
    tell_read, schema, cache = wants_progress(body), schema_of(body.response_format), cache_options(body.millpond)
    tools = tools_of(body, service.calls, service.tokens.shown)
    tag = None if tools is None else tools.constraint(schema)
    if isinstance(body.response_format, StructuralTag):
        if tools is not None:
            raise two_of("response_format of type structural_tag", "tools")
        tag = body.response_format.constraint("response_format")
    urls = service.images.check(body.messages)
    requested = chat_marks(body.messages, body.millpond, service.breakpoints.needed(cache))
    prompt, marks = await service.tokens.read_chat(body.messages, body, body.tool_choice != "none", requested)
    if most_is_bound and max_tokens is not None:
        n = prompt.n_tokens if isinstance(prompt, Prompt) else len(prompt)
        max_tokens = requested_tokens = max(1, min(max_tokens, service.llm.text_limit - n))
    check_room([prompt], requested_tokens, service.llm.text_limit)
    params = sampling(
        body,
        max_tokens=max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        json_schema=schema if tag is None else None,
        structural_tag=tag,
        kept_special_tokens=() if tools is None else service.tokens.special(tools.format.marks),
        stop=() if service.tokens.has_template else (PLAIN_STOP,),
    )
    images = await service.images.read(urls)
    engine_requests = requests(
        name, [prompt], params, body.millpond, body.cache_salt, service.settings.timeout_s, marks, tell_read, images
    )
    return ChatRequest(engine_requests, tools, held=tag is not None)
