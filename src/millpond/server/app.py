"""The ASGI app: all routes behind the middleware."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware

import millpond
from millpond.server import errors
from millpond.server.client_pacing import ClientPacingMiddleware
from millpond.server.llm_protocol import ServedCluster, ServedLLM
from millpond.server.metrics import Counted, Metrics
from millpond.server.middleware import ApiKeyMiddleware, BodyLimitMiddleware, Hosts
from millpond.server.openapi.document import describe
from millpond.server.request_log import RequestLog
from millpond.server.routes import (
    cache_memory,
    chat,
    cluster,
    completions,
    infill,
    info,
    messages,
    responses,
    sessions,
    ui,
)
from millpond.server.service import Service
from millpond.server.settings import ServerSettings
from millpond.tiers.free_memory import give_back

#: Seconds that the engine has to end when the server goes down.
_CLOSE_S = 1.0
#: Seconds between two times at which freed memory is returned to the system, where there were requests.
_TIDY_S = 5.0


def create_app(llm: ServedLLM, settings: ServerSettings | None = None) -> FastAPI:
    """Return an ASGI app that serves one model; `app.state.service` serves its routes.

    The engine is closed when the app shuts down.
    """
    settings = settings or ServerSettings()
    service = Service(llm, settings)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        loops = (service.admission.watch(), _tidy(service.metrics, give_back, _TIDY_S))
        tasks = [asyncio.create_task(loop) for loop in loops]
        yield
        for task in tasks:
            task.cancel()
        await service.admission.drain(settings.drain_s)
        await llm.close(drain=False, timeout=_CLOSE_S)
        service.tokens.close()
        service.bodies.close()
        service.images.close()

    app = FastAPI(
        title="Millpond",
        version=millpond.__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,  # of which the last is `describe`'s
        redirect_slashes=False,  # to another route, perhaps, or to the host that a header names
        description="An OpenAI-compatible server whose KV cache stays inside a memory budget.",
    )
    app.state.service = service
    errors.install(app)
    for part in (completions, chat, responses, messages, infill, info, cache_memory, sessions):
        app.include_router(part.routes(service))
    if isinstance(llm, ServedCluster):
        app.include_router(cluster.routes(service, llm))
    app.include_router(ui.routes(needs_key=bool(settings.api_keys)))
    describe(app, keyed=bool(settings.api_keys))
    # the last one added runs first
    app.add_middleware(
        BodyLimitMiddleware,
        limit=settings.max_body_bytes,
        within_s=settings.body_timeout_s,
        together=settings.max_bytes_under_way,
    )
    app.add_middleware(
        ClientPacingMiddleware, pacing=service.pacing, clients=service.clients, open_paths=frozenset({"/health"})
    )
    app.add_middleware(
        ApiKeyMiddleware, keys=settings.api_keys, open_paths=ui.PATHS | {"/health"}, operator_key=settings.operator_key
    )
    if settings.cors_origins:  # in front of keys, which no preflight has
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=("request-id", "retry-after"),
        )
    app.add_middleware(Hosts, allowed=settings.allowed_hosts, keyed=bool(settings.api_keys))
    app.add_middleware(Counted, metrics=service.metrics)
    app.add_middleware(RequestLog)
    return app


async def _tidy(metrics: Metrics, release: Callable[[], object], seconds: float) -> None:
    """Return memory of large bodies from the heap to the system by `release`.

    It happens where there were requests meanwhile.
    """
    before = 0
    while True:
        await asyncio.sleep(seconds)
        if (now := metrics.requests) != before:
            before = now
            await asyncio.to_thread(release)
