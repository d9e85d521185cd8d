"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's interface."""

from __future__ import annotations

import uuid
from typing import Any

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from starlette.responses import Response

from millpond.server.anthropic_chat import chat_fields, chat_messages, chat_of, use_tools
from millpond.server.anthropic_format import MessagesCall
from millpond.server.anthropic_schemas import CountTokensBody, MessagesBody
from millpond.server.body_parsing import ParsedRoute
from millpond.server.routes.chat import chat_request_of
from millpond.server.service import Service


def routes(service: Service) -> APIRouter:
    """Return the routes that answer messages, and count their tokens."""
    router = APIRouter(route_class=ParsedRoute)

    @router.post("/v1/messages", response_model=None)
    async def message(body: MessagesBody, http: HttpRequest) -> Response:
        """The next message of a conversation."""
        response = await service.answer(http, await call_of(service, body))
        response.headers["request-id"] = f"req_{uuid.uuid4().hex}"
        return response

    @router.post("/v1/messages/count_tokens")
    async def count(body: CountTokensBody) -> dict[str, Any]:
        """How many tokens of the conversation the model would read."""
        service.check_model(body.model)
        fields = chat_fields(body, service.tokens.has_template)
        _, ids = await service.tokens.chat(chat_messages(body), fields, use_tools(body))
        return {"input_tokens": len(ids)}

    return router


async def call_of(service: Service, body: MessagesBody) -> MessagesCall:
    """Return the call that a body asks for, checked.

    Raises:
        ApiError, OptionError: it cannot be.
    """
    name = f"msg_{uuid.uuid4().hex}"
    chat = await chat_request_of(service, chat_of(body, service.tokens.has_template), name, most_is_bound=True)
    stops = tuple(body.stop_sequences or ())
    return MessagesCall(name, chat.requests, chat.tools, chat.held, body.max_tokens, stops, bool(body.stream))
