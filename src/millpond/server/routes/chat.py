"""POST /v1/chat/completions."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import NamedTuple

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from starlette.responses import Response

from millpond.cache.state.span_marks import FairShare
from millpond.engine.chunks.prompt import Prompt
from millpond.engine.request import Request
from millpond.server.answers import ChatVoice, ChoicesJob
from millpond.server.body_parsing import ParsedRoute
from millpond.server.chat_breakpoints import breakpoints_of, check_marks
from millpond.server.chunk_parts import has_chunks, refuse_spans
from millpond.server.errors import ApiError
from millpond.server.fair_shares import FAIR, share_of_chat, with_shares
from millpond.server.forget import FORGET, enclosed_forgets
from millpond.server.message_spans import FORGOTTEN, KEEP, Span, kept_pieces, refuse_keep
from millpond.server.prompt_breakpoints import refuse_breakpoints
from millpond.server.request_mapping import (
    cache_options,
    check_room,
    most_tokens,
    requests,
    sampling,
    schema_of,
    wants_progress,
)
from millpond.server.schemas import ChatBody
from millpond.server.service import Service
from millpond.server.structured_outputs import StructuralTag, two_of
from millpond.server.tokenizer_worker import PLAIN_STOP
from millpond.server.tools.response_format import CallVoice
from millpond.server.tools.tool_choice import Tools, tools_of


def routes(service: Service) -> APIRouter:
    """The route that answers chats."""
    router = APIRouter(route_class=ParsedRoute)

    @router.post("/v1/chat/completions", response_model=None)
    async def chat(body: ChatBody, http: HttpRequest) -> Response:
        """The next message of a chat."""
        return await service.answer(http, await job_of(service, body))

    return router


async def job_of(service: Service, body: ChatBody) -> ChoicesJob:
    """What a body asks for, checked.

    Raises:
        ApiError, OptionError: it cannot be.
    """
    name = f"chatcmpl-{uuid.uuid4().hex}"
    asked = await asked_of(service, body, name)
    include_usage = body.stream_options is not None and body.stream_options.include_usage
    scores = bool(body.logprobs)
    voice = ChatVoice(scores) if asked.tools is None else CallVoice(asked.tools, asked.held, scores)
    return ChoicesJob(name, asked.requests, voice, bool(body.stream), include_usage)


class AskedChat(NamedTuple):
    """A chat as the engine gets it.

    Attributes:
        requests: the one request. tools: that can be called. held: the answer follows `tools.constraint`.
    """

    requests: list[Request]
    tools: Tools | None
    held: bool


async def asked_of(service: Service, body: ChatBody, name: str, *, most_is_bound: bool = False) -> AskedChat:
    """The engine's request of a chat, checked.

    Args:
        name: its id. most_is_bound: fewer new tokens than `max_tokens` are no error where the context holds no more.

    Raises:
        ApiError, OptionError: it cannot be.
    """
    service.check_model(body.model)
    service.tokens.check_fields(body)
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs=true", "invalid_value", "top_logprobs")
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        message = f"max_tokens={body.max_tokens} and max_completion_tokens={body.max_completion_tokens}: give one"
        raise ApiError(400, message, "invalid_value", "max_tokens")
    asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if asked == 0:
        raise ApiError(400, "max_tokens=0: must be at least 1", "invalid_value", "max_tokens")
    most = most_tokens(asked, service.settings.max_tokens)
    tools = tools_of(body, service.calls, service.tokens.shown)
    schema = schema_of(body.response_format)
    tag = None if tools is None else tools.constraint(schema)
    if isinstance(body.response_format, StructuralTag):
        if tools is not None:
            raise two_of("response_format of type structural_tag", "tools")
        tag = body.response_format.constraint("response_format")
    chat = await _read(service, body)
    if most_is_bound and most is not None:
        n = chat.prompt.n_tokens if isinstance(chat.prompt, Prompt) else len(chat.prompt)
        most = asked = max(1, min(most, service.llm.text_limit - n))
    check_room([chat.prompt], asked, service.llm.text_limit)
    params = sampling(
        body,
        max_tokens=most,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        json_schema=schema if tag is None else None,
        structural_tag=tag,
        kept_special_tokens=() if tools is None else service.tokens.special(tools.format.marks),
        stop=() if service.tokens.has_template else (PLAIN_STOP,),
    )
    made = requests(
        name,
        [chat.prompt],
        params,
        body.millpond,
        body.cache_salt,
        service.settings.timeout_s,
        chat.messages,
        chat.breakpoints,
        chat.keep,
        chat.forget,
        chat.fair,
        wants_progress(body),
    )
    return AskedChat(made, tools, held=tag is not None)


class _ReadChat(NamedTuple):
    """What the model reads of a chat, and spans of it in tokens.

    Attributes:
        messages: where they lie, for `millpond.forgotten`. breakpoints: numbers of tokens. keep: what stays.
        forget: what is forgotten. fair: messages with their share of the budget.
    """

    prompt: tuple[int, ...] | Prompt
    messages: tuple[Span, ...] = ()
    breakpoints: tuple[int, ...] = ()
    keep: tuple[Span, ...] = ()
    forget: tuple[Span, ...] = ()
    fair: tuple[FairShare, ...] = ()


async def _read(service: Service, body: ChatBody) -> _ReadChat:
    """
    Raises:
        ApiError: see `TokenizerWorker.chat`, `TokenizerWorker.chunked_chat` and `TokenizerWorker.chat_spans`; or there
            are chunks, and `millpond.forgotten`, `millpond.forget` or `millpond.fair_shares` is set or something
            stays; or too many marks or messages with a share; or `millpond.forget` names what is not there.
    """
    refuse_spans(body.millpond.chunks)
    refuse_keep(body.millpond.keep, 'in a chat mark messages or text parts with "millpond": {"keep": true}')
    refuse_breakpoints(body.millpond.breakpoints, "in a chat mark messages or text parts with cache_control")
    check_marks(body.messages)
    share = share_of_chat(body.millpond)
    use_tools, told = body.tool_choice != "none", body.millpond.forgotten
    stays = any(kept_pieces(message) for message in body.messages)
    enclosed = enclosed_forgets(body.millpond.forget or (), body.messages)
    if has_chunks(body.messages):
        if enclosed:
            message = "messages with chunks cannot forget parts of a chat; leave out one of the two"
            raise ApiError(400, message, "invalid_value", FORGET)
        if share is not None:
            message = "messages with chunks have no shares of the budget; leave out one of the two"
            raise ApiError(400, message, "invalid_value", FAIR)
        if told or stays:
            field, what = (FORGOTTEN, "do not tell what was forgotten") if told else (KEEP, "are not kept by span")
            raise ApiError(400, f"messages with chunks {what}; leave out one of the two", "invalid_value", field)
        return _ReadChat(await service.tokens.chunked_chat(body.messages, body, use_tools))
    stops = service.breakpoints.needed(cache_options(body.millpond))
    found: Sequence[Span] | None = None
    if told or share is not None:
        prompt, found = await service.tokens.chat_spans(body.messages, body, use_tools)
    elif stops:
        prompt, found = await service.tokens.chat_ends(body.messages, body, use_tools)
    elif not stays and not enclosed:
        _, prompt = await service.tokens.chat(body.messages, body, use_tools)
    keep: tuple[Span, ...] = ()
    if stays:
        prompt, keep = await service.tokens.kept_in_chat(body.messages, body, use_tools)
    forget: tuple[Span, ...] = ()
    if enclosed:
        prompt, forget = await service.tokens.pieces_in_chat(body.messages, body, use_tools, enclosed, FORGET)
    breakpoints = breakpoints_of(body.messages, found) if stops and found is not None else ()
    fair = () if share is None or found is None else with_shares(found, [share] * len(found))
    return _ReadChat(prompt, tuple(found or ()) if told else (), breakpoints, keep, forget, fair)
