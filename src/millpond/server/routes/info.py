"""GET /v1/models, /health, /version, /metrics; POST /tokenize, /detokenize."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from functools import cache
from typing import Any

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import JSONResponse, Response

import millpond
from millpond.errors import OptionError
from millpond.methods import METHODS
from millpond.option_files import shown
from millpond.presets import PRESETS
from millpond.server.body_parsing import ParsedRoute
from millpond.server.errors import ApiError
from millpond.server.llm_protocol import ServedCluster
from millpond.server.schemas import DetokenizeBody, TokenizeBody
from millpond.server.service import Service


def routes(service: Service) -> APIRouter:
    """Return the routes that tell of the server and its tokenizer."""
    router = APIRouter(route_class=ParsedRoute)
    began = int(time.time())

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The model that is served, as the only one of a list."""
        name = service.llm.model_name
        data = [_model(service, began)]
        return {"object": "list", "data": data, "has_more": False, "first_id": name, "last_id": name}

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """The model of that name."""
        service.check_model(name)
        return _model(service, began)

    @router.get("/health")
    async def health() -> JSONResponse:
        """Whether new requests are accepted: 200, or 503 if the server shuts down, or the engine hangs or has ended.

        A server with several workers also says how many accept requests, by role; 503 if a role has none.
        """
        llm = service.llm
        roles = {"roles": dict(llm.live())} if isinstance(llm, ServedCluster) else {}
        if service.admission.draining:
            return JSONResponse({"status": "shutting down"}, 503)
        if (trouble := service.admission.trouble) is not None:
            return JSONResponse({"status": "stalled", "reason": trouble, **roles}, 503)
        return JSONResponse({"status": "ok", **roles})

    @router.get("/version")
    async def version() -> dict[str, str]:
        """The version of Millpond."""
        return {"version": millpond.__version__}

    @router.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """All gauges and counters, for Prometheus."""
        return Response(service.metrics.text(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    @router.post("/tokenize")
    async def tokenize(body: TokenizeBody) -> dict[str, Any]:
        """The token ids of a text, or of messages through the chat template."""
        service.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "give either prompt or messages", "invalid_value", "prompt")
        if body.prompt is not None:
            ids = await service.tokens.encode(body.prompt, body.add_special_tokens)
        else:
            _, ids = await service.tokens.chat(body.messages or [], body)
        return {"tokens": list(ids), "count": len(ids), "max_model_len": service.llm.context_length}

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeBody) -> dict[str, Any]:
        """The text of token ids, special tokens included."""
        service.check_model(body.model)
        return {"prompt": await service.tokens.decode(body.tokens)}

    return router


def _template(service: Service) -> str | None:
    if not service.tokens.exists:
        return None
    return "of the tokenizer" if service.tokens.has_template else "plain"


@cache
def _without_budget() -> list[str]:
    """Return methods that keep everything, and take no budget."""
    names = []
    for name in METHODS.names():
        try:
            policy = METHODS.get(name)()
        except (OptionError, TypeError):  # it needs an option, and so has something to choose by
            continue
        if not policy.takes_budget:
            names.append(name)
    return names


def _model(service: Service, created: int) -> dict[str, Any]:
    llm, cache = service.llm, service.llm.cache
    return {
        "id": llm.model_name,
        "object": "model",
        "type": "model",
        "display_name": llm.model_name,
        "created": created,
        "created_at": datetime.fromtimestamp(created, UTC).isoformat(),
        "owned_by": "millpond",
        "millpond": {
            "context_length": llm.context_length,
            "methods": METHODS.names(),
            "without_budget": _without_budget(),
            "presets": PRESETS,
            "method": cache.method,
            "options": {name: shown(value) for name, value in cache.options.items()},
            "budget": None if cache.budget is None else str(cache.budget),
            "codec": cache.codec,
            "kv_limit_bytes": llm.stats().kv_limit,
            "tokenizer": service.tokens.exists,
            "chat_template": _template(service),
        },
    }
