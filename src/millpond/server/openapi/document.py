"""The document at /openapi.json: FastAPI's, with what is sent described completely."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from threading import Lock
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.responses import JSONResponse

from millpond.server.openapi import answers, info, messages

#: The first version that can say what each event of a stream is.
_VERSION = "3.2.0"
_REF = "#/components/schemas/{model}"
#: Why an error comes, by its status.
_REASONS = {
    400: "The request is invalid; `param` and `message` say where, and what to do.",
    401: "No API key, or an unknown one.",
    403: "A better priority than this client may ask for, or a key that is not the operator's.",
    404: "No such model, or no such request.",
    408: "The body, or the first token, did not come within its time limit.",
    409: "Another worker is being drained.",
    411: "The length of the body must be known.",
    413: "The body is too long, or has too many values.",
    421: "The request names a host that is not allowed.",
    422: "The request is valid but can never be served: an impossible budget, or more memory than there is.",
    429: "Too many prompts wait.",
    500: "The server or its engine failed.",
    503: "New requests are refused: the server shuts down, its engine hangs, or too many bytes are in flight.",
}
#: Of every route.
_ALWAYS = (408, 411, 413, 421, 500, 503)
_WAITED = {408, 429, 503}


@dataclass(frozen=True, slots=True)
class _Sent:
    """Answers of a route.

    Attributes:
        whole: Its answer; None: a text.
        events: Kinds of each event of a stream, but an error.
        done: Whether streams end with "[DONE]".
        errors: Statuses besides those of every route.
        error: Body of errors.
        empty: A status without a body, and why.
        others: Answers of other statuses that are no errors.
        named: Whether each event of a stream has a name.
    """

    whole: type[BaseModel] | None
    events: tuple[type[BaseModel], ...] = ()
    done: bool = False
    errors: tuple[int, ...] = ()
    error: type[BaseModel] = answers.ErrorAnswer
    empty: tuple[int, str] | None = None
    others: tuple[int, type[BaseModel]] | None = None
    needs_key: bool = True
    named: bool = True


_OF_ANSWERS = (400, 403, 404, 422, 429)
_SENT = {
    ("/v1/completions", "post"): _Sent(answers.Completion, (answers.CompletionChunk,), True, _OF_ANSWERS),
    ("/v1/chat/completions", "post"): _Sent(answers.Chat, (answers.ChatChunk,), True, _OF_ANSWERS),
    ("/v1/responses", "post"): _Sent(answers.ResponseAnswer, answers.EVENTS, errors=_OF_ANSWERS),
    ("/infill", "post"): _Sent(
        info.Infilled, (info.InfillChunk, info.Infilled, answers.ErrorAnswer), errors=_OF_ANSWERS, named=False
    ),
    ("/v1/messages", "post"): _Sent(
        messages.SentMessage, messages.EVENTS, errors=_OF_ANSWERS, error=messages.AnthropicErrorAnswer
    ),
    ("/v1/messages/count_tokens", "post"): _Sent(
        messages.CountedTokens, errors=(400, 404), error=messages.AnthropicErrorAnswer
    ),
    ("/v1/models", "get"): _Sent(info.ServedModels),
    ("/v1/models/{name}", "get"): _Sent(info.ServedModel, errors=(404,)),
    ("/health", "get"): _Sent(info.Health, others=(503, info.Health), needs_key=False),
    ("/version", "get"): _Sent(info.Version),
    ("/metrics", "get"): _Sent(None),
    ("/tokenize", "post"): _Sent(info.Tokenized, errors=(400, 404)),
    ("/detokenize", "post"): _Sent(info.Detokenized, errors=(400, 404)),
    ("/v1/millpond/sessions", "get"): _Sent(info.Sessions, errors=(400, 404)),
    ("/v1/millpond/sessions", "delete"): _Sent(info.SessionsDeleted, errors=(400, 404)),
    ("/v1/millpond/sessions/{session_id}", "delete"): _Sent(info.SessionsDeleted, errors=(400, 404)),
    ("/v1/millpond/memory/{request_id}", "get"): _Sent(
        info.MemoryOfLayer, errors=(400, 404), empty=(204, "The request waits and holds nothing.")
    ),
    ("/cluster", "get"): _Sent(info.ClusterWorkers, errors=(403,)),
    ("/cluster/workers/{name}/drain", "post"): _Sent(info.WorkerDrained, errors=(400, 403, 404, 409)),
}


def describe(app: FastAPI, keyed: bool) -> None:
    """Let `app.openapi` and /openapi.json say what `app` sends.

    Args:
        app: The app.
        keyed: Whether the server has API keys.
    """
    lock = Lock()
    made: list[dict[str, Any]] = []

    def complete() -> dict[str, Any]:
        with lock:
            if not made:
                made.append(_completed(FastAPI.openapi(app), keyed))
        return made[0]

    @app.get("/openapi.json", include_in_schema=False)
    def document() -> JSONResponse:  # no coroutine: it takes long the first time, and runs in a thread of its own
        return JSONResponse(complete())

    app.openapi = complete  # type: ignore[method-assign]


def _completed(document: dict[str, Any], keyed: bool) -> dict[str, Any]:
    document["openapi"] = _VERSION
    components = document["components"]
    for unsent in ("HTTPValidationError", "ValidationError"):
        components["schemas"].pop(unsent, None)
    routes = [_SENT[path, method] for path, operations in document["paths"].items() for method in operations]
    kinds = list(dict.fromkeys(kind for sent in routes for kind in _models(sent)))
    _, schemas = models_json_schema([(kind, "validation") for kind in kinds], ref_template=_REF)
    for name, schema in schemas["$defs"].items():
        had = components["schemas"].setdefault(name, schema)  # of a body, where a response repeats a format
        assert had["properties"].keys() == schema["properties"].keys(), f"two schemas are called {name}"
    if keyed:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            sent = _SENT[path, method]
            operation["responses"] = _responses(sent, keyed)
            if keyed and sent.needs_key:
                operation["security"] = [{"key": []}]
    return document


def _models(sent: _Sent) -> Iterator[type[BaseModel]]:
    yield sent.error
    yield from sent.events
    if sent.whole is not None:
        yield sent.whole


def _responses(sent: _Sent, keyed: bool) -> dict[str, Any]:
    whole = {"text/plain": {"schema": {"type": "string"}}} if sent.whole is None else _json(_ref(sent.whole))
    if sent.events:
        whole["text/event-stream"] = {"itemSchema": _event(sent)}
    by_status: dict[int, Any] = {200: {"description": "The answer.", "content": whole}}
    if sent.empty is not None:
        by_status[sent.empty[0]] = {"description": sent.empty[1]}
    for status in {*_ALWAYS, *sent.errors, *([401] if keyed and sent.needs_key else [])}:
        schema = _ref(sent.error)
        if sent.others is not None and sent.others[0] == status:
            schema = {"anyOf": [_ref(sent.others[1]), schema]}
        by_status[status] = {"description": _REASONS[status], "content": _json(schema)}
        if status in _WAITED:
            by_status[status]["headers"] = {"Retry-After": _header("Seconds to wait; not always sent.", "integer")}
        if status == 401:
            by_status[status]["headers"] = {"WWW-Authenticate": _header("Bearer.", "string")}
    return {str(status): by_status[status] for status in sorted(by_status)}


def _event(sent: _Sent) -> dict[str, Any]:
    """Return an event of a stream; an error may be the last one if the status was long sent."""
    kinds = [_ref(kind) for kind in (*sent.events, *((sent.error,) if sent.done else ()))]
    data: dict[str, Any] = {"type": "string", "contentMediaType": "application/json", "contentSchema": {"anyOf": kinds}}
    if sent.done:
        data = {"anyOf": [data, {"const": "[DONE]"}]}
    if sent.done or not sent.named:
        return {"type": "object", "properties": {"data": data}, "required": ["data"]}
    return {"type": "object", "properties": {"event": {"type": "string"}, "data": data}, "required": ["event", "data"]}


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _ref(kind: type[BaseModel]) -> dict[str, Any]:
    return {"$ref": _REF.format(model=kind.__name__)}


def _header(text: str, kind: str) -> dict[str, Any]:
    return {"description": text, "schema": {"type": kind}}
