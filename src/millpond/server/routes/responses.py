"""POST /v1/responses: OpenAI's newer interface, for text and tools; nothing is stored."""

from __future__ import annotations

import uuid
from typing import Any

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from starlette.responses import Response

from millpond.engine.sampling.params import SamplingParams
from millpond.server.body_parsing import ParsedRoute
from millpond.server.errors import ApiError
from millpond.server.messages import Message, Tool
from millpond.server.prompt_marks import IN_RESPONSE, ChatMarks, refuse_marks
from millpond.server.request_mapping import cache_options, check_room, most_tokens, requests, sampling, schema_of
from millpond.server.responses import ChosenFunction, FunctionCall, NamedSchema, ResponseBody, ResponsesCall
from millpond.server.schemas import ChatBody, ChatFields, NamedFunction, NamedTool, ObjectFormat
from millpond.server.service import Service
from millpond.server.text_reader import PLAIN_STOP
from millpond.server.tools.tool_choice import tools_of


def routes(service: Service) -> APIRouter:
    """Return the route that answers in responses."""
    router = APIRouter(route_class=ParsedRoute)

    @router.post("/v1/responses", response_model=None)
    async def respond(body: ResponseBody, http: HttpRequest) -> Response:
        """The next message after a text or a conversation; nothing of it is stored."""
        return await service.answer(http, await call_of(service, body))

    return router


async def call_of(service: Service, body: ResponseBody) -> ResponsesCall:
    """Return the call that a body asks for, checked.

    Raises:
        ApiError, OptionError: it cannot be.
    """
    service.check_model(body.model)
    service.tokens.check_fields(body)
    most = most_tokens(body.max_output_tokens, service.settings.max_tokens, "max_output_tokens")
    offered = [tool.as_chat() for tool in body.tools or ()]
    fields = ChatFields(tools=offered or None, chat_template_kwargs=body.chat_template_kwargs)
    refuse_marks(body.millpond, IN_RESPONSE)
    logprobs = "message.output_text.logprobs" in (body.include or ()) or body.top_logprobs is not None
    wanted = None if body.text is None else body.text.format
    schema = wanted.schema_ if isinstance(wanted, NamedSchema) else schema_of(wanted)
    tools = tools_of(_choice(body, offered, schema), service.calls, service.tokens.shown)
    if tools is not None and logprobs:
        message = "log probabilities go with text alone: leave out tools, or include and top_logprobs"
        raise ApiError(400, message, "invalid_value", "top_logprobs")
    tag = None if tools is None else tools.constraint(schema)
    messages, shows = _messages(body), body.tool_choice != "none"
    requested = ChatMarks(messages, breakpoints=service.breakpoints.needed(cache_options(body.millpond)))
    prompt, marks = await service.tokens.read_chat(messages, fields, shows, requested)
    check_room([prompt], body.max_output_tokens, service.llm.text_limit)
    params = sampling(
        body,
        max_tokens=most,
        logprobs=(body.top_logprobs or 0) if logprobs else None,
        json_schema=schema if tag is None else None,
        structural_tag=tag,
        kept_special_tokens=() if tools is None else service.tokens.special(tools.format.marks),
        stop=() if service.tokens.has_template else (PLAIN_STOP,),
    )
    name = f"resp_{uuid.uuid4().hex}"
    made = requests(name, [prompt], params, body.millpond, body.cache_salt, service.settings.timeout_s, marks)
    return ResponsesCall(name, made, _echo(body, params), tools, tag is not None, bool(body.stream), logprobs)


def _choice(body: ResponseBody, offered: list[Tool], schema: dict[str, Any] | None) -> ChatBody:
    """Return the tools of a body in the fields of a chat."""
    choice = body.tool_choice
    if isinstance(choice, ChosenFunction):
        named = NamedTool(type="function", function=NamedFunction(name=choice.name))
    return ChatBody.model_construct(
        tools=offered,
        tool_choice=named if isinstance(choice, ChosenFunction) else choice,
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=None if schema is None else ObjectFormat(type="json_object"),
    )


def _messages(body: ResponseBody) -> list[Message]:
    """Return the conversation as a chat."""
    messages = [Message(role="system", content=body.instructions)] if body.instructions is not None else []
    if isinstance(body.input, str):
        return [*messages, Message(role="user", content=body.input)]
    for item in body.input:
        if not isinstance(item, FunctionCall):
            messages.append(item.as_chat())
        elif messages and messages[-1].role == "assistant":
            messages[-1] = messages[-1].model_copy(
                update={"tool_calls": [*(messages[-1].tool_calls or ()), item.as_call()]}
            )
        else:
            messages.append(Message(role="assistant", tool_calls=[item.as_call()]))
    return messages


def _echo(body: ResponseBody, params: SamplingParams) -> dict[str, Any]:
    """Return the fields of the request that a response repeats."""
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
        "tool_choice": body.tool_choice.model_dump()
        if isinstance(body.tool_choice, ChosenFunction)
        else body.tool_choice or "auto",
        "tools": [tool.model_dump() for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": "disabled",
    }
