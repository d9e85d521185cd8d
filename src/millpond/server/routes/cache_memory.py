"""GET /v1/millpond/memory/{id}: what a request's cache remembers, as the page shows it."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query
from fastapi import Path as InPath
from fastapi import Request as HttpRequest
from starlette.responses import Response

from millpond.engine.outputs import CacheSnapshot
from millpond.server.errors import ApiError
from millpond.server.service import Service


def routes(service: Service) -> APIRouter:
    """Return the route that looks into a cache."""
    router = APIRouter()

    @router.get("/v1/millpond/memory/{request_id}", response_model=None, responses={204: {"description": "It waits."}})
    async def memory(
        http: HttpRequest,
        request_id: Annotated[str, InPath(max_length=200)],
        layer: Annotated[int, Query(ge=0, le=10_000)] = 0,
        since: Annotated[int, Query(ge=0, le=2**31, description="Texts of tokens from this one on.")] = 0,
    ) -> dict[str, Any] | Response:
        """Per token of prompt and answer: the share of a layer's heads that hold it, and its mean score.

        For a request that runs, and for one that was sent with `millpond: {"watch": true}` and ended recently. 204
        without a body: the request waits and holds nothing. Requests of other clients are not found.
        """
        client = service.clients.of(http).name
        snapshot = await service.llm.memory(request_id, layer, client)
        if snapshot is None and service.admission.under_way.get(request_id) == client:
            return Response(status_code=204)
        if snapshot is None:
            message = f"there is no request {request_id!r} of yours: it has ended, or never existed"
            raise ApiError(404, message, "request_not_found", "request_id")
        return await _shown(service, snapshot, since)

    return router


async def _shown(service: Service, memory: CacheSnapshot, since: int) -> dict[str, Any]:
    return {
        "layer": memory.layer,
        "n_layers": memory.n_layers,
        "n_kv_heads": memory.n_kv_heads,
        "since": since,
        "texts": await service.tokens.texts(memory.token_ids[since:]),
        "kept": [round(share, 3) for share in memory.kept],
        "scores": [None if score is None else float(f"{score:.4g}") for score in memory.scores],
        "seen": memory.kv.seen,
        "held": memory.kv.held,
        "kv_bytes": memory.kv.kv_bytes,
        "unused_bytes": memory.kv.unused_bytes,
        "full_kv_bytes": memory.kv.full_kv_bytes,
        "evicted": memory.kv.evicted,
    }
