"""What every request passes before it is read: the API key and the length of its body. Plain ASGI."""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from millpond.server.clients import key_of
from millpond.server.errors import ApiError


class Keys:
    """Refuses whoever has no API key, but on `open_paths`."""

    def __init__(self, app: ASGIApp, keys: tuple[str, ...], open_paths: frozenset[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]
        self._open = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._open or not self._keys or self._known(scope):
            await self._app(scope, receive, send)
            return
        message = "this server asks for an API key: send 'Authorization: Bearer KEY'"
        refusal = ApiError(401, message, "invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        await refusal.response()(scope, receive, send)

    def _known(self, scope: Scope) -> bool:
        given = key_of(scope)
        found = [hmac.compare_digest(given, known) for known in self._keys]  # all of them: time tells nothing
        return any(found)


class ShortBodies:
    """Reads bodies of at most `limit` bytes and refuses longer ones, whatever their headers say."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = Headers(scope=scope).get("content-length", "0")
        parts: list[Message] = []
        total = int(length[:19]) if length.isdecimal() else 0  # longer numbers are no smaller
        if total <= self._limit:
            total = 0
            while total <= self._limit and (not parts or parts[-1].get("more_body", False)):
                parts.append(await receive())
                total += len(parts[-1].get("body", b""))
        if total > self._limit:
            message = f"the body has {total:,} bytes or more and may have {self._limit:,}"
            await ApiError(413, message, "body_too_large").response()(scope, receive, send)
            return
        parts.reverse()

        async def replay() -> Message:
            return parts.pop() if parts else await receive()

        await self._app(scope, replay, send)
