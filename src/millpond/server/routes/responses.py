"""POST /v1/responses: OpenAI's newer interface, for text; nothing is stored."""

from __future__ import annotations

import uuid
from typing import Any

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from starlette.responses import Response

from millpond.engine.sampling.params import SamplingParams
from millpond.server.body_parsing import ParsedRoute
from millpond.server.chat_breakpoints import breakpoints_of
from millpond.server.chunk_parts import refuse_spans
from millpond.server.fair_shares import refuse_fair_shares
from millpond.server.forget import refuse_forget
from millpond.server.message_spans import refuse_forgotten, refuse_keep
from millpond.server.messages import Message
from millpond.server.prompt_breakpoints import refuse_breakpoints
from millpond.server.request_mapping import cache_options, check_room, most_tokens, requests, sampling, schema_of
from millpond.server.responses_format import ResponseJob
from millpond.server.responses_schemas import NamedSchema, ResponseBody
from millpond.server.schemas import ChatFields
from millpond.server.service import Service
from millpond.server.tokenizer_worker import PLAIN_STOP


def routes(service: Service) -> APIRouter:
    """The route that answers in responses."""
    router = APIRouter(route_class=ParsedRoute)

    @router.post("/v1/responses", response_model=None)
    async def respond(body: ResponseBody, http: HttpRequest) -> Response:
        """The next message, to a text or a conversation; nothing of it is stored."""
        return await service.answer(http, await job_of(service, body))

    return router


async def job_of(service: Service, body: ResponseBody) -> ResponseJob:
    """What a body asks for, checked.

    Raises:
        ApiError, OptionError: it cannot be.
    """
    service.check_model(body.model)
    service.tokens.check_fields(body)
    most = most_tokens(body.max_output_tokens, service.settings.max_tokens, "max_output_tokens")
    fields = ChatFields(chat_template_kwargs=body.chat_template_kwargs)
    refuse_spans(body.millpond.chunks)
    refuse_forgotten(body.millpond.forgotten)
    refuse_forget(body.millpond.forget)
    refuse_keep(body.millpond.keep, "use /v1/chat/completions, whose messages can be kept")
    refuse_fair_shares(body.millpond, "use /v1/chat/completions, whose messages can have a share")
    refuse_breakpoints(body.millpond.breakpoints, "use /v1/chat/completions, whose messages may have cache_control")
    said = _messages(body)
    breakpoints: tuple[int, ...] = ()
    if service.breakpoints.needed(cache_options(body.millpond)):
        prompt, spans = await service.tokens.chat_ends(said, fields, use_tools=False)
        breakpoints = () if spans is None else breakpoints_of(said, spans)
    else:
        _, prompt = await service.tokens.chat(said, fields, use_tools=False)
    check_room([prompt], body.max_output_tokens, service.llm.text_limit)
    logprobs = "message.output_text.logprobs" in (body.include or ()) or body.top_logprobs is not None
    wanted = None if body.text is None else body.text.format
    params = sampling(
        body, max_tokens=most, logprobs=(body.top_logprobs or 0) if logprobs else None,
        json_schema=wanted.schema_ if isinstance(wanted, NamedSchema) else schema_of(wanted),
        stop=() if service.tokens.has_template else (PLAIN_STOP,),
    )  # fmt: skip
    name = f"resp_{uuid.uuid4().hex}"
    made = requests(
        name, [prompt], params, body.millpond, body.cache_salt, service.settings.timeout_s, breakpoints=breakpoints
    )
    return ResponseJob(name, made, _echo(body, params), bool(body.stream), logprobs)


def _messages(body: ResponseBody) -> list[Message]:
    """The conversation as a chat."""
    said = [Message(role="system", content=body.instructions)] if body.instructions is not None else []
    if isinstance(body.input, str):
        return [*said, Message(role="user", content=body.input)]
    return said + [message.as_chat() for message in body.input]


def _echo(body: ResponseBody, params: SamplingParams) -> dict[str, Any]:
    """Fields of the request that a response repeats."""
    wanted = None if body.text is None else body.text.format
    shown = {"type": "text"} if wanted is None else wanted.model_dump(by_alias=True, exclude_none=True)
    return {
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "store": False,
        "temperature": params.temperature,
        "text": {"format": shown},
        "tool_choice": body.tool_choice or "auto",
        "tools": [],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": "disabled",
    }
