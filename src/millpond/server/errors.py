"""Errors in the form that clients of OpenAI, or of Anthropic, read.

For OpenAI's clients they are {"error": {"message", "type", "param", "code"}} and a status.
"""

from __future__ import annotations

import difflib
import logging
import reprlib
import uuid
from collections.abc import Iterable, Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import Scope

from millpond.errors import (
    BudgetError,
    DataError,
    ImageError,
    MillpondError,
    OptionError,
    PoolFullError,
    UnsupportedModelError,
    WouldForgetError,
)

#: Key of a scope for the code of the error that ended the request.
FAILED = "millpond.failed"
#: Status and code of Millpond's own errors; the first that fits. 400: it cannot be parsed; 422: it can be parsed, but
#: never be done.
_STATUS: tuple[tuple[type[MillpondError], int, str], ...] = (
    (WouldForgetError, 422, "would_forget"),
    (BudgetError, 422, "budget_impossible"),
    (PoolFullError, 422, "kv_memory_exceeded"),
    (UnsupportedModelError, 422, "unsupported"),
    (ImageError, 400, "invalid_image"),
    (OptionError, 400, "invalid_value"),
    (DataError, 500, "file_failed"),
)
#: Message to clients about a file that could not be read or written; only the operator's log names the file.
_FILE_FAILED = "a file of the server that this request needs could not be read or written; ask again, or its operator"

#: Most characters of a message that are sent, and of a field's name that are read: both may come from a client.
_LONGEST, _LONGEST_NAME = 1_000, 80
_log = logging.getLogger(__name__)
_TYPES = {401: "authentication_error", 429: "rate_limit_error"}
#: First part of the paths of Anthropic's interface, and its names of errors by status.
ANTHROPIC = "/v1/messages"
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}

#: Fields of OpenAI's interface that would change the answer and cannot be obeyed.
UNSUPPORTED = {
    "functions": "use tools",
    "function_call": "use tools and tool_choice",
    "audio": "answers are text",
    "refusal": "no template shows it; put what was said into content",
    "modalities": "answers are text",
    "prediction": "there is no speculative decoding",
    "reasoning_effort": "put what the chat template takes into chat_template_kwargs",
    "web_search_options": "the server does not search",
    "previous_response_id": "nothing is stored; send the conversation so far, answers included, as input",
    "conversation": "nothing is stored; send the conversation so far, answers included, as input",
    "background": "nothing is stored; wait for the answer, or stream it",
    "reasoning": "put what the chat template takes into chat_template_kwargs",
    "verbosity": "the model has no such setting",
}


#: Every field of every body by name, for suggestions; bodies add theirs.
KNOWN_FIELDS: set[str] = set()
#: Those of the object `millpond`.
CACHE_FIELDS: set[str] = set()


class ApiError(Exception):
    """An answer that is an error.

    Attributes:
        status: Status of HTTP.
        message: Text for a person.
        code: Word for a program.
        param: Field that it is about.
        headers: Headers to be sent with it.
    """

    def __init__(
        self, status: int, message: str, code: str, param: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers = dict(headers or {})

    @classmethod
    def of(cls, error: MillpondError) -> ApiError:
        """Return a typed error of Millpond with the status that fits it."""
        status, code = next(((s, c) for kind, s, c in _STATUS if isinstance(error, kind)), (500, "engine_failed"))
        if isinstance(error, DataError):
            _log.error("a request failed: %s", error)
            return cls(status, _FILE_FAILED, code)
        return cls(status, str(error), code)

    def body(self) -> dict[str, Any]:
        """Return the body; a lone surrogate from the request cannot be sent, and is replaced."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        param = None if self.param is None else self.param[:_LONGEST].encode("utf-8", "replace").decode()
        return {"error": {"message": self._text, "type": kind, "param": param, "code": self.code}}

    def anthropic_body(self) -> dict[str, Any]:
        """Return the same as Anthropic's clients read it; its id is new."""
        kind = _ANTHROPIC_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        name = f"req_{uuid.uuid4().hex}"
        return {"type": "error", "error": {"type": kind, "message": self._text}, "request_id": name}

    @property
    def _text(self) -> str:
        text = self.message if len(self.message) <= _LONGEST else f"{self.message[: _LONGEST - 3]}..."
        return text.encode("utf-8", "replace").decode()

    def response(self, scope: Scope) -> JSONResponse:
        """Return the answer of a request, and note the error's code in its scope."""
        scope[FAILED], path = self.code, scope["path"]
        if path != ANTHROPIC and not path.startswith(f"{ANTHROPIC}/"):
            return JSONResponse(self.body(), self.status, self.headers)
        body = self.anthropic_body()
        return JSONResponse(body, self.status, {**self.headers, "request-id": body["request_id"]})


def install(app: FastAPI) -> None:
    """Give every error of `app` this form."""

    async def api_error(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, ApiError)
        return error.response(request.scope)

    async def millpond_error(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, MillpondError)
        return ApiError.of(error).response(request.scope)

    async def invalid(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return of_validation(error.errors()).response(request.scope)

    async def http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        code, message, path = "invalid_request", str(error.detail), request.scope["path"][:_LONGEST_NAME]
        if error.status_code == 404:
            code, message = "not_found", f"there is no address {path!r} here; GET /openapi.json lists all of them"
        elif error.status_code == 405:
            taken = (error.headers or {}).get("Allow", "another method")
            code, message = "method_not_allowed", f"{path!r} does not take {request.method}; it takes {taken}"
        return ApiError(error.status_code, message, code, headers=error.headers).response(request.scope)

    async def bug(request: Request, error: Exception) -> JSONResponse:
        message = f"the server failed with {type(error).__name__}; its log says more"
        return ApiError(500, message, "internal_error").response(request.scope)

    app.add_exception_handler(ApiError, api_error)
    app.add_exception_handler(MillpondError, millpond_error)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(Exception, bug)


def of_validation(errors: Iterable[Mapping[str, Any]]) -> ApiError:
    """Return the first error of pydantic.

    It is broken JSON, an unknown field, or a value of the wrong kind.
    """
    first = next(iter(errors))
    place = [str(part)[:_LONGEST_NAME] for part in first["loc"] if part not in ("body", "query", "path", "")]
    name = ".".join(place)
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", first["msg"])
        return ApiError(400, f"the body is not JSON: {reason}", "invalid_json")
    if first["type"] == "extra_forbidden" or (
        first["type"] in ("none_required", "literal_error") and place[-1] in UNSUPPORTED
    ):
        return ApiError(400, _unknown(place), "unknown_parameter", name)
    if not place:
        message = "the body must be a JSON object, sent with Content-Type: application/json"
        return ApiError(400, message, "invalid_body")
    if place[0] == "prompt" and first["type"] != "missing":
        message = "prompt must be a text, a list of texts, a list of token ids or a list of such lists"
        return ApiError(400, message, "invalid_value", "prompt")
    if first["type"] == "value_error":  # of a check of ours, which says what it found
        return ApiError(400, f"{name}: {first['ctx']['error']}", "invalid_value", name)
    return ApiError(400, f"{name}: {first['msg']}, not {_shown(first.get('input'))}", "invalid_value", name)


def _unknown(place: list[str]) -> str:
    name = place[-1]
    if name in UNSUPPORTED:
        return f"{'.'.join(place)} is not supported: {UNSUPPORTED[name]}"
    if place == [name] and name in CACHE_FIELDS:
        return f"unknown field {name!r}; did you mean 'millpond.{name}'?"
    others = [
        known for known in sorted(KNOWN_FIELDS) if known not in UNSUPPORTED and known != name
    ]  # it may be known elsewhere
    close = difflib.get_close_matches(name, others, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"unknown field {'.'.join(place)!r}{hint}"


def _shown(value: Any) -> str:
    try:
        text = reprlib.repr(value)  # which reads the first of many values only
    except (ValueError, RecursionError):  # an integer of thousands of digits; a value nested beyond reason
        return f"this {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."
