"""GET and DELETE /v1/millpond/sessions: the stored turns that a client's requests may continue."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Header
from fastapi import Path as InPath
from fastapi import Request as HttpRequest

from millpond.engine.request import MAX_SALT
from millpond.engine.sessions.store import SessionStore
from millpond.server.errors import ApiError
from millpond.server.service import Service

#: The `cache_salt` of the requests whose turns are meant: a header, since addresses are written to logs.
Salt = Annotated[str | None, Header(alias="Millpond-Cache-Salt", min_length=1, max_length=MAX_SALT)]
SessionId = Annotated[str, InPath(pattern="^[0-9a-f]{32}$")]


def routes(service: Service) -> APIRouter:
    """Return the routes about stored turns."""
    router = APIRouter()

    @router.get("/v1/millpond/sessions")
    async def sessions(http: HttpRequest, salt: Salt = None) -> dict[str, Any]:
        """The stored turns of the client's key and salt, the last used first."""
        store = _store(service)
        turns = await asyncio.to_thread(store.sessions, _salt(service, http, salt))
        data = [
            {
                "id": one.session_id,
                "object": "millpond.session",
                "tokens": one.n_tokens,
                "bytes": one.nbytes,
                "last_used": round(one.last_used, 3),
            }
            for one in turns
        ]
        return {"object": "list", "data": data}

    @router.delete("/v1/millpond/sessions")
    async def remove_all(http: HttpRequest, salt: Salt = None) -> dict[str, Any]:
        """Remove all stored turns of the client's key and salt."""
        return await _removed(service, http, salt, None)

    @router.delete("/v1/millpond/sessions/{session_id}")
    async def remove(http: HttpRequest, session_id: SessionId, salt: Salt = None) -> dict[str, Any]:
        """Remove one stored turn; the turns of other clients are not found."""
        return await _removed(service, http, salt, session_id)

    return router


async def _removed(service: Service, http: HttpRequest, salt: str | None, session_id: str | None) -> dict[str, Any]:
    store = _store(service)
    removed = await asyncio.to_thread(store.remove, _salt(service, http, salt), session_id)
    if session_id is not None and not removed:
        raise ApiError(404, f"there is no session {session_id!r} of yours", "session_not_found", "session_id")
    return {"object": "millpond.sessions.deleted", "deleted": removed}


def _salt(service: Service, http: HttpRequest, salt: str | None) -> str | None:
    return service.clients.salt(service.clients.of(http), salt)


def _store(service: Service) -> SessionStore:
    """Return the store of turns.

    Raises:
        ApiError: 404, the server stores none.
    """
    if service.llm.sessions is None:
        message = "this server stores no sessions; its operator starts it with --cache-dir"
        raise ApiError(404, message, "sessions_not_stored")
    return service.llm.sessions
