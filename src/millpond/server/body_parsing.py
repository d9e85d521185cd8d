"""Bodies of requests: counted before anything is built of them, and parsed and checked away from the event loop."""

from __future__ import annotations

import email.message
import typing
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from millpond.server.client_pacing import in_thread
from millpond.server.errors import ApiError, of_validation

M = TypeVar("M", bound=BaseModel)

#: Bodies of at most this many bytes and values are parsed in place: that takes less than handing them to a thread.
_SHORT, _FEW = 2**15, 500
#: Most backslashes: each makes a string longer to read.
_ESCAPES = 2**20
#: Bytes that are counted at a time: while one piece is, no other thread runs Python.
_PIECE = 2**16
_QUOTE, _COMMA, _COLON, _SQUARE, _CURLY = b'",:[{'
#: Errors of one body beyond which none is shown: to write them down takes longer than to find them.
_SHOWN_ERRORS = 1_000


@dataclass(frozen=True, slots=True)
class Counts:
    """Numbers of parts of a JSON text, outside its strings.

    Attributes:
        values: Values of all kinds, about.
        keys: Keys of objects.
        nests: Arrays and objects.
    """

    values: int
    keys: int
    nests: int

    def within(self, items: int) -> bool:
        """Return whether it has few enough values, keys, arrays and objects.

        These are at most `items` values, an eighth as many keys and a sixteenth as many arrays and objects.
        """
        return self.values <= items and self.keys <= items // 8 and self.nests <= items // 16


class JsonBodies:
    """Makes checked bodies of JSON texts.

    Args:
        most_items: Values that a body may have, see `Counts.within`.
    """

    def __init__(self, most_items: int) -> None:
        self._most = most_items
        self._thread = ThreadPoolExecutor(1, "bodies")

    def close(self) -> None:
        """Let the thread go."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def parse(self, raw: bytes, kind: type[M]) -> M:
        """Return the body as `kind`.

        Raises:
            ApiError: too many values, no JSON, or not what `kind` says.
        """
        if len(raw) <= _SHORT and _count(raw).values <= _FEW:
            return _parsed(raw, kind)
        return await in_thread(self._thread, self._checked, raw, kind)

    def _checked(self, raw: bytes, kind: type[M]) -> M:
        escapes = raw.count(b"\\")
        if escapes > _ESCAPES:
            message = f"the body has {escapes:,} escapes in its strings and may have {_ESCAPES:,}; send text as UTF-8"
            raise ApiError(413, message, "body_too_large")
        if not count_outside_strings(raw, self._most).within(self._most):
            message = (
                f"the body has more than {self._most:,} values, {self._most // 8:,} keys or {self._most // 16:,} "
                "arrays and objects; send less in one request"
            )
            raise ApiError(413, message, "body_too_large")
        return _parsed(raw, kind)


class ParsedRoute(APIRoute):
    """A route whose body is parsed by the app's `JsonBodies`."""

    def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:  # type: ignore[override]
        """Return the handler of a request."""
        handle = super().get_route_handler()
        hints = typing.get_type_hints(self.endpoint).values()
        kinds = [hint for hint in hints if isinstance(hint, type) and issubclass(hint, BaseModel)]
        if not kinds:
            return handle
        (kind,) = kinds

        async def parse_first(http: Request) -> Response:
            bodies: JsonBodies = http.app.state.service.bodies
            return await handle(_Parsed(http, await bodies.parse(await _read(http), kind)))

        return parse_first


class _Parsed(Request):
    """A request whose JSON is checked already."""

    def __init__(self, http: Request, body: BaseModel) -> None:
        super().__init__(http.scope, http.receive)
        self._body_fields = body

    async def body(self) -> bytes:
        """Return a text that is not empty, so that FastAPI asks for `json`."""
        return b"{}"

    async def json(self) -> Any:
        """Return the checked body."""
        return self._body_fields


async def _read(http: Request) -> bytes:
    """Return the body, which `http` does not keep."""
    kind = email.message.Message()
    kind["content-type"] = http.headers.get("content-type", "")
    subtype = kind.get_content_subtype()
    if kind.get_content_maintype() != "application" or not (subtype == "json" or subtype.endswith("+json")):
        message = "the body must be a JSON object, sent with Content-Type: application/json"
        raise ApiError(400, message, "invalid_body")
    parts: list[bytes] = []
    more = True
    while more:
        message_ = await http.receive()
        parts.append(message_.get("body", b""))
        more = message_.get("more_body", False)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _parsed(raw: bytes, kind: type[M]) -> M:
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        if error.error_count() > _SHOWN_ERRORS:
            message = f"{error.error_count():,} values of the body are not as they must be, too many to name one"
            raise ApiError(400, message, "invalid_body") from None
        raise of_validation(error.errors(include_url=False)) from None


def count_outside_strings(raw: bytes, enough: int) -> Counts:
    """Return counts of a JSON text, or of its beginning if it has more than `enough` values.

    Example:
        >>> count_outside_strings(b'{"a,b": [1, 2]}', 100)
        Counts(values=3, keys=1, nests=2)
    """
    values = keys = nests = 0
    inside, escaped = False, False  # a string, and by a backslash, where a piece begins
    for begin in range(0, len(raw), _PIECE):
        piece = raw[begin : begin + _PIECE]
        if escaped:
            piece = b"_" + piece[1:]
        if b"\\" in piece:
            piece = piece.replace(b"\\\\", b"__").replace(b'\\"', b"__")
        escaped = piece.endswith(b"\\")
        codes = np.frombuffer(piece, np.uint8)
        within = np.logical_xor.accumulate(codes == _QUOTE)
        if inside:
            within = ~within
        inside = bool(within[-1])
        outside = codes[~within]
        keys += int(np.count_nonzero(outside == _COLON))
        opened = int(np.count_nonzero((outside == _SQUARE) | (outside == _CURLY)))
        nests += opened
        values += int(np.count_nonzero(outside == _COMMA)) + opened
        if values > enough:
            break
    return Counts(values, keys, nests)


def _count(raw: bytes) -> Counts:
    """Return the same of a short text, strings included."""
    nests = raw.count(b"[") + raw.count(b"{")
    return Counts(raw.count(b",") + nests, raw.count(b":"), nests)
