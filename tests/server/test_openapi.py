"""/openapi.json against what is really sent: every route, every status that it names, every event of a stream."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import jsonschema_rs
import pytest
import schemathesis

from millpond.engine.sessions.folder import SessionInfo
from millpond.errors import BudgetError, MillpondError
from millpond.server.app import create_app
from millpond.server.routes import ui
from millpond.server.settings import ServerSettings
from server.test_chat import templated
from tests.helpers.server.fake import FakeLLM
from tests.helpers.server.routes import all_routes

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "w5"}], "max_tokens": 4}
#: Path of the document, after another word where it has several methods -> method, what is asked for, and a body.
ROUTES: dict[str, tuple[str, str, dict[str, Any] | None]] = {
    "/v1/completions": ("post", "/v1/completions", {"prompt": "w5", "max_tokens": 4}),
    "/v1/chat/completions": ("post", "/v1/chat/completions", CHAT),
    "/v1/responses": ("post", "/v1/responses", {"input": "w5", "max_output_tokens": 4}),
    "/v1/messages": ("post", "/v1/messages", CHAT),
    "/v1/messages/count_tokens": ("post", "/v1/messages/count_tokens", {"messages": CHAT["messages"]}),
    "/infill": ("post", "/infill", {"input_prefix": "w5", "input_suffix": "w7", "n_predict": 4}),
    "/v1/models": ("get", "/v1/models", None),
    "/v1/models/{name}": ("get", "/v1/models/fake/counter", None),
    "/health": ("get", "/health", None),
    "/version": ("get", "/version", None),
    "/metrics": ("get", "/metrics", None),
    "/tokenize": ("post", "/tokenize", {"prompt": "w5"}),
    "/detokenize": ("post", "/detokenize", {"tokens": [5]}),
    "/v1/millpond/memory/{request_id}": ("get", "/v1/millpond/memory/one", None),
    "/v1/millpond/sessions": ("get", "/v1/millpond/sessions", None),
    "remove /v1/millpond/sessions": ("delete", "/v1/millpond/sessions", None),
    "/v1/millpond/sessions/{session_id}": ("delete", f"/v1/millpond/sessions/{'a' * 32}", None),
}
ANSWERS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/infill")
SESSIONS = tuple(route for route in ROUTES if "sessions" in route)
KEYED = ServerSettings(api_keys=("one",), max_body_bytes=2_000, max_bytes_under_way=3_000, body_timeout_s=0.1)


class FakeSessions:
    """One stored turn of everyone."""

    client_secret = bytes(32)

    def sessions(self, salt: str | None) -> list[SessionInfo]:
        return [SessionInfo("a" * 32, 12, 4_096, 1e9)]

    def remove(self, salt: str | None, session_id: str | None = None) -> int:
        return int(session_id in (None, "a" * 32))


def path_of(route: str) -> str:
    """The path of the document."""
    return route.rpartition(" ")[2]


def app_of(llm: FakeLLM | None = None, settings: ServerSettings | None = None) -> Any:
    return create_app(llm or templated(), settings)


DOCUMENT: dict[str, Any] = app_of(settings=KEYED).openapi()


@dataclass
class Case:
    """A request, and what makes its answer.

    Attributes:
        body: changes the usual one. path: in place of the usual one. prepare: of app and engine, before.
    """

    route: str
    status: int
    body: dict[str, Any] = field(default_factory=dict)
    path: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    prepare: Callable[[Any, FakeLLM], None] = lambda app, llm: None


def name_of(case: Case) -> str:
    """The same in every process that collects tests."""
    return f"{case.status} {case.route} {case.body or case.path or ''}"


def check(route: str, status: int, headers: Any, body: bytes) -> None:
    """That the document describes this answer."""
    method = ROUTES[route][0]
    described = DOCUMENT["paths"][path_of(route)][method]["responses"]
    assert str(status) in described, f"{status} of {route}: {body.decode()}"
    said = described[str(status)]
    kind = headers.get("content-type", "").split(";")[0]
    assert (kind in said["content"]) if body else "content" not in said
    for name in ("Retry-After", "WWW-Authenticate"):
        assert name not in headers or name in said.get("headers", {}), f"{name} with {status} of {route}"
    if kind == "application/json":
        validate(said["content"][kind]["schema"], json.loads(body))
    elif kind == "text/event-stream":
        for event in events_of(body.decode()):
            validate(said["content"][kind]["itemSchema"], event)
            schema = said["content"][kind]["itemSchema"]["properties"]["data"]
            schema = next((one for one in schema.get("anyOf", ()) if "contentSchema" in one), schema)
            if event["data"] != "[DONE]":
                validate(schema["contentSchema"], json.loads(event["data"]))


def validate(schema: dict[str, Any], value: Any) -> None:
    jsonschema_rs.validator_for({**schema, "components": DOCUMENT["components"]}).validate(value)


def events_of(text: str) -> list[dict[str, str]]:
    parts = [part for part in text.split("\n\n") if part]
    return [dict(line.split(": ", 1) for line in part.split("\n")) for part in parts]


def client_of(app: Any, **headers: str) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://test", timeout=20, headers=headers)


async def ask(case: Case, app: Any, key: str = "one") -> httpx.Response:
    method, path, body = ROUTES[case.route]
    content = None if body is None else json.dumps(body | case.body)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"} | case.headers
    async with client_of(app, **headers) as client:
        return await client.request(method, case.path or path, content=content)


def run(case: Case, **settings: Any) -> httpx.Response:
    llm = templated()
    llm.tokenizer.add_tokens(["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"])
    if "memory" in case.route:
        llm.running.add("one")
    if "sessions" in case.route:
        llm.sessions = FakeSessions()
    app = app_of(llm, ServerSettings(**{"api_keys": ("one",), "max_body_bytes": 2_000} | settings))
    case.prepare(app, llm)
    found = asyncio.run(ask(case, app))
    assert found.status_code == case.status, found.text
    check(case.route, found.status_code, found.headers, found.content)
    return found


def test_every_route_is_described() -> None:
    served = {pair for pair in all_routes(app_of()) if pair[0] not in ui.PATHS and not pair[0].startswith("/page/")}
    served -= {("/openapi.json", "get")}
    assert served == {(path, method) for path, found in DOCUMENT["paths"].items() for method in found}
    assert served == {(path_of(route), method) for route, (method, _, _) in ROUTES.items()}


def test_the_document_is_valid() -> None:
    schemathesis.openapi.from_dict(DOCUMENT).validate()
    for schema in DOCUMENT["components"]["schemas"].values():
        jsonschema_rs.meta.validate(schema)
    names = set(DOCUMENT["components"]["schemas"])
    text = json.dumps(DOCUMENT)
    used = {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert used == names


def test_the_document_says_who_needs_a_key() -> None:
    assert DOCUMENT["components"]["securitySchemes"] == {"key": {"type": "http", "scheme": "bearer"}}
    for path, operations in DOCUMENT["paths"].items():
        for operation in operations.values():
            assert ("security" in operation) == ("401" in operation["responses"]) == (path != "/health")
    open_to_all = app_of().openapi()
    assert "securitySchemes" not in open_to_all["components"]
    assert "401" not in json.dumps(open_to_all["paths"])


def test_the_served_document_is_this_one() -> None:
    async def work() -> Any:
        async with client_of(app_of(settings=KEYED), Authorization="Bearer one") as client:
            return (await client.get("/openapi.json")).json()

    assert asyncio.run(work()) == DOCUMENT


@pytest.mark.parametrize(
    "case",
    [
        *(Case(route, 200) for route in ROUTES),
        Case("/v1/completions", 200, {"prompt": ["w5", "w6"], "n": 2, "logprobs": 2, "echo": True}),
        Case("/v1/chat/completions", 200, {"n": 2, "logprobs": True, "top_logprobs": 2}),
        Case("/v1/responses", 200, {"top_logprobs": 2, "metadata": {"a": "b"}, "instructions": None}),
        Case("/v1/responses", 200, {"text": {"format": {"type": "json_schema", "name": "x", "schema": {}}}}),
        Case("/v1/responses", 200, {"tools": [{"type": "function", "name": "w5"}], "parallel_tool_calls": False}),
        Case("/infill", 200, {"response_fields": ["content", "timings/prompt_n"], "n_predict": 0}),
        Case("/tokenize", 200, {"prompt": None, "messages": CHAT["messages"]}),
        Case(
            "/v1/millpond/memory/{request_id}",
            204,
            prepare=lambda app, llm: (
                llm.running.clear(),
                app.state.service.admission.under_way.update(one=app.state.service.clients._hash("one")),
            ),
        ),
    ],
    ids=name_of,
)
def test_answers_are_as_described(case: Case) -> None:
    run(case)


@pytest.mark.covering
@pytest.mark.parametrize("more", [{}, {"stream_options": {"include_usage": True}}, {"scores": True}], ids=str)
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("route", ANSWERS)
def test_streams_are_as_described(route: str, fails: bool, more: dict[str, Any]) -> None:
    def prepare(_: Any, llm: FakeLLM) -> None:
        llm.fails = MillpondError("the model broke") if fails else None

    scores = {
        "/v1/completions": {"logprobs": 2},
        "/v1/chat/completions": {"logprobs": True, "top_logprobs": 2},
        "/v1/responses": {"top_logprobs": 2},
        "/v1/messages": {"temperature": 0.5},
        "/infill": {"n_indent": 2},
    }
    usual = {} if route in ("/v1/messages", "/infill") else more
    body = {"stream": True} | (scores[route] if more.get("scores") else usual)
    found = run(Case(route, 200, body, prepare=prepare))
    assert found.headers["content-type"].startswith("text/event-stream")
    assert ("the model broke" in found.text) == fails
    assert len(events_of(found.text)) > (1 if fails else 4)


def drained(app: Any, _: FakeLLM) -> None:
    app.state.service.admission.draining = True


def broken(error: Exception) -> Callable[[Any, FakeLLM], None]:
    """What every route asks fails."""

    def prepare(app: Any, llm: FakeLLM) -> None:
        def fail(*_: Any, **__: Any) -> Any:
            raise error

        service = app.state.service
        if llm.sessions is not None:
            llm.sessions.sessions = llm.sessions.remove = fail
        service.check_model = service.metrics.text = llm.memory = llm.stats = llm.trouble = fail

    return prepare


@pytest.mark.parametrize(
    "case",
    [
        *(Case(route, 400, {"unknown": 1}) for route, (method, _, _) in ROUTES.items() if method == "post"),
        Case("/v1/completions", 400, {"prompt": 5}),
        Case("/v1/chat/completions", 400, {"messages": []}),
        Case("/v1/millpond/memory/{request_id}", 400, path="/v1/millpond/memory/one?layer=9"),
        Case("/v1/millpond/memory/{request_id}", 400, path="/v1/millpond/memory/one?layer=x"),
        Case("/v1/millpond/memory/{request_id}", 404, path="/v1/millpond/memory/other"),
        Case("/v1/models/{name}", 404, path="/v1/models/other"),
        *(Case(route, 404, {"model": "other"}) for route, (method, _, _) in ROUTES.items() if method == "post"),
        *(Case(route, 404, prepare=lambda app, llm: setattr(llm, "sessions", None)) for route in SESSIONS),
        *(Case(route, 400, headers={"Millpond-Cache-Salt": "x" * 300}) for route in SESSIONS),
        *(Case(route, 403, {"millpond": {"priority": -5}}) for route in ANSWERS),
        *(
            Case(route, 408, {"millpond": {"deadline_s": 0.01}}, prepare=lambda _, llm: llm.open.clear())
            for route in ANSWERS
        ),
        *(Case(route, 422, prepare=broken(BudgetError("too small"))) for route in ANSWERS),
        *(
            Case(
                route,
                429,
                prepare=lambda app, llm: (
                    llm.open.clear(),
                    app.state.service.admission.under_way.update({str(number): "" for number in range(300)}),
                ),
            )
            for route in ANSWERS
        ),
        *(Case(route, 503, prepare=drained) for route in (*ANSWERS, "/health")),
        Case("/health", 503, prepare=lambda _, llm: setattr(llm, "hangs", "one step takes long")),
        *(Case(route, 503, prepare=lambda _, llm: setattr(llm, "hangs", "one step takes long")) for route in ANSWERS),
        *(
            Case(route, 500, prepare=broken(RuntimeError("a mistake of ours")))
            for route in ROUTES
            if route != "/version"
        ),
        *(Case(route, 411, headers={"Transfer-Encoding": "chunked"}) for route in ROUTES),
        *(Case(route, 413, headers={"Content-Length": "9999"}) for route in ROUTES),
        *(Case(route, 401, headers={"Authorization": "Bearer two"}) for route in ROUTES if route != "/health"),
    ],
    ids=name_of,
)
def test_errors_are_as_described(case: Case) -> None:
    run(case)


@pytest.mark.parametrize("route", ROUTES)
def test_other_hosts_are_refused_as_described(route: str) -> None:
    run(Case(route, 421, headers={"Host": "elsewhere"}), allowed_hosts=("here",))


@pytest.mark.parametrize("route", ROUTES)
def test_slow_and_large_bodies_are_refused_as_described(route: str) -> None:
    """Two of 1,600 bytes at a time where 3,000 may be: the second is refused, and the first never comes to its end."""

    async def work() -> list[tuple[int, dict[str, str], bytes]]:
        app = app_of(settings=KEYED)
        first = asyncio.create_task(unfinished(app, route))
        await asyncio.sleep(0.02)
        return [await unfinished(app, route), await first]

    second, first = asyncio.run(work())
    assert (first[0], second[0]) == (408, 503)
    for status, headers, body in (first, second):
        check(route, status, httpx.Headers(headers), body)


async def unfinished(app: Any, route: str) -> tuple[int, dict[str, str], bytes]:
    """What becomes of a request whose body begins and never ends."""
    method, path, _ = ROUTES[route]
    begun: list[dict[str, Any]] = [{"type": "http.request", "body": b" " * 1_600, "more_body": True}]
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        if not begun:
            await asyncio.sleep(60)
        return begun.pop()

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    headers = [(b"host", b"test"), (b"authorization", b"Bearer one"), (b"content-type", b"application/json")]
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method.upper(),
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": headers,
        "server": ("test", 80),
        "scheme": "http",
        "client": ("127.0.0.1", 1),
        "root_path": "",
    }
    call: Awaitable[None] = app(scope, receive, send)
    await call
    found = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], found, b"".join(message.get("body", b"") for message in sent[1:])


def test_every_status_that_is_described_is_seen() -> None:
    """What the tests above ask for: each (route, status) of the document."""
    seen: set[tuple[str, str]] = set()
    for test in (test_answers_are_as_described, test_errors_are_as_described):
        (mark,) = [mark for mark in test.pytestmark if mark.name == "parametrize"]  # type: ignore[attr-defined]
        seen |= {(path_of(case.route), str(case.status)) for case in mark.args[1]}
    seen |= {(path_of(route), status) for route in ROUTES for status in ("408", "421", "503")}
    seen.add(("/version", "500"))  # a constant, with nothing in it that could fail
    described = {
        (path, status)
        for path, operations in DOCUMENT["paths"].items()
        for operation in operations.values()
        for status in operation["responses"]
    }
    assert seen == described
