"""GET /cluster, POST /cluster/workers/{name}/drain: the workers of a server that has several."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from fastapi import Path as InPath
from fastapi import Request as HttpRequest

from millpond.engine.cluster_figures import WorkerInfo
from millpond.server.errors import ApiError
from millpond.server.identity import OperatorKey
from millpond.server.llm_protocol import ServedCluster
from millpond.server.service import Service

#: Numbers of each worker's engine there.
NUMBERS = ("running", "waiting", "swapped", "kv_bytes", "kv_reserved", "kv_limit", "prompt_tokens", "generated_tokens")


def routes(service: Service, cluster: ServedCluster) -> APIRouter:
    """Return the routes that tell of workers, and drain them."""
    router = APIRouter()
    draining: set[str] = set()
    operator = OperatorKey(service.settings.operator_key, keyed=bool(service.settings.api_keys))

    @router.get("/cluster")
    async def workers(http: HttpRequest) -> dict[str, Any]:
        """All workers with their roles, states, requests and bytes, and what was moved, replayed and lost.

        Needs the operator's key, if the server has any keys.
        """
        operator.check(http.scope, changes=False)
        return {"workers": [_worker(one) for one in cluster.workers()], **asdict(cluster.figures())}

    @router.post("/cluster/workers/{name}/drain")
    async def drain(
        http: HttpRequest,
        name: Annotated[str, InPath(max_length=200)],
        replace: Annotated[bool, Query(description="Start another worker in its place.")] = True,
        role: Annotated[
            Literal["prefill", "decode"] | None, Query(description="Role of that worker. Default: the same.")
        ] = None,
    ) -> dict[str, Any]:
        """Let others continue the requests of a worker, and end it. One drain at a time; needs the operator's key."""
        operator.check(http.scope, changes=True)
        if name not in {one.name for one in cluster.workers()}:
            raise ApiError(404, f"no worker {name!r}; GET /cluster lists them", "worker_not_found", "name")
        if draining:
            raise ApiError(
                409, f"worker {min(draining)} is being drained: wait until it has ended", "drain_in_progress"
            )
        draining.add(name)
        try:
            done = await cluster.drain(name, replace=replace, role=role)
        finally:
            draining.clear()
        seconds = round(done.seconds, 3)
        return {"worker": done.worker, "moved": done.moved, "replayed": done.replayed, "seconds": seconds}

    return router


def _worker(one: WorkerInfo) -> dict[str, Any]:
    shown = {field.name: getattr(one, field.name) for field in fields(one) if field.name != "stats"}
    if one.stats is None:
        return shown
    return shown | {name: getattr(one.stats, name) for name in NUMBERS}
