"""Middleware run before a body is parsed: API key, and limits on the length and time of the body. Plain ASGI."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from millpond.server.errors import ApiError
from millpond.server.identity import OperatorKey, key_of, of_operator

#: Sent with a refusal before the body was read: the server does not wait for the rest.
_CLOSE = {"Connection": "close"}


class ApiKeyMiddleware:
    """Refuses requests without an API key, but on `open_paths`.

    Args:
        app: The app.
        keys: Keys of the server.
        open_paths: Paths that need no key.
        operator_key: Key that passes too for the routes of workers, which check it; see `OperatorKey`.
    """

    def __init__(
        self, app: ASGIApp, keys: tuple[str, ...], open_paths: frozenset[str], operator_key: str | None = None
    ) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]
        self._open = open_paths
        self._operator = OperatorKey(operator_key, keyed=bool(keys))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._open or not self._keys or self._known(scope):
            await self._app(scope, receive, send)
            return
        known = "the API key is not one of this server's" if key_of(scope) else "this server asks for an API key"
        message = f"{known}: send 'Authorization: Bearer KEY', or 'x-api-key: KEY'"
        refusal = ApiError(401, message, "invalid_api_key", headers=_CLOSE | {"WWW-Authenticate": "Bearer"})
        await refusal.response(scope)(scope, receive, send)

    def _known(self, scope: Scope) -> bool:
        given = key_of(scope)
        matches = [hmac.compare_digest(given, known) for known in self._keys]  # all of them: time tells nothing
        return any(matches) or (of_operator(scope["path"]) and self._operator.matches(scope))


class Hosts:
    """Refuses requests of web pages whose site's name points at this machine (DNS rebinding).

    A server without keys that listens on loopback is meant for this machine. A browser here sends it what any page
    asks for, but names the page's site as the host.

    Args:
        app: The app.
        allowed: Hosts besides loopback; if there are any, the Host header is checked at every address.
        keyed: Whether the server has keys, which no page knows.
    """

    def __init__(self, app: ASGIApp, allowed: tuple[str, ...], keyed: bool) -> None:
        self._app = app
        self._allowed = frozenset(host.lower() for host in allowed)
        self._keyed = keyed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        host = _host(Headers(scope=scope).get("host", "")) if scope["type"] == "http" else "localhost"
        if host in self._allowed or _is_loopback(host) or not self._checks(scope):
            await self._app(scope, receive, send)
            return
        message = (
            f"host {host[:100]!r} is not this server; name it as it listens, or let its operator allow the host "
            "(--allow-host)"
        )
        await ApiError(421, message, "unknown_host", headers=_CLOSE).response(scope)(scope, receive, send)

    def _checks(self, scope: Scope) -> bool:
        at = str((scope.get("server") or ("",))[0])
        return bool(self._allowed) or (not self._keyed and at not in ("", "localhost") and _is_loopback(at))


def _host(header: str) -> str:
    """Return the host of a header, without its port: "name:80", "[::1]:80"."""
    name, _, port = header.strip().rpartition(":")
    name = name if name and port.isdecimal() else header.strip()
    return name.removeprefix("[").removesuffix("]").rstrip(".").lower()


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class BodyLimitMiddleware:
    """Reads bodies and refuses those that are too long, too slow or too many at a time.

    Args:
        app: The app.
        limit: Most bytes of a body.
        within_s: Seconds that one may take.
        together: Most bytes of all bodies whose requests are not answered.

    Attributes:
        held: Bytes of all of them now.
    """

    def __init__(self, app: ASGIApp, limit: int, within_s: float, together: int) -> None:
        self.held = 0
        self._app = app
        self._limit = limit
        self._within_s = within_s
        self._together = together

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = bytearray()
        try:
            self._check_header(Headers(scope=scope))
            try:
                async with asyncio.timeout(self._within_s):
                    whole = await self._read(receive, body)
            except TimeoutError:
                message = f"the body did not come within {self._within_s:g} seconds"
                raise ApiError(408, message, "body_timeout", headers=_CLOSE) from None
            if whole:  # else the client is gone
                await self._app(scope, _replay(body, receive), send)
        except ApiError as refusal:
            await refusal.response(scope)(scope, receive, send)
        finally:
            self.held -= len(body)

    def _check_header(self, headers: Headers) -> None:
        if "transfer-encoding" in headers:
            message = "the length of a body must be known: send Content-Length instead of Transfer-Encoding"
            raise ApiError(411, message, "length_required", headers=_CLOSE)
        length = headers.get("content-length", "0")
        if length.isdecimal() and (len(length) > 18 or int(length) > self._limit):  # longer numbers are no smaller
            raise self._too_long(length[:19])

    async def _read(self, receive: Receive, body: bytearray) -> bool:
        """Add to `body` what comes; False: the client went away."""
        more = True
        while more:
            message = await receive()
            if message["type"] != "http.request":
                return False
            part = message.get("body", b"")
            if len(body) + len(part) > self._limit:
                raise self._too_long(str(len(body) + len(part)))
            if self.held + len(part) > self._together:
                text = f"bodies of {self.held:,} bytes are in flight already; the limit is {self._together:,}"
                raise ApiError(503, text, "too_many_bytes", headers=_CLOSE | {"Retry-After": "1"})
            body += part
            self.held += len(part)
            more = message.get("more_body", False)
        return True

    def _too_long(self, length: str) -> ApiError:
        message = f"the body has {int(length):,} bytes or more and may have {self._limit:,}"
        return ApiError(413, message, "body_too_large", headers=_CLOSE)


def _replay(body: bytearray, receive: Receive) -> Receive:
    """Return a receiver that gives a body that was read, and then what comes after it."""
    parts: list[Message] = [{"type": "http.request", "body": bytes(body), "more_body": False}]

    async def again() -> Message:
        return parts.pop() if parts else await receive()

    return again
