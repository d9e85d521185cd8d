"""Whose is it: every id that a client can send, sent by another key, is answered as one that nobody ever had."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

import millpond as mp
from millpond.server.app import create_app
from millpond.server.settings import ServerSettings
from server.test_chat import templated
from server.test_openapi import all_routes
from tests.helpers.server.fake import FakeLLM
from tests.helpers.server.fake_cluster import FakeCluster

#: Method, path of the document, and the parameter or field, with the fields that it lies in.
Place = tuple[str, str, str]
SALT = "Millpond-Cache-Salt"
SETTINGS = ServerSettings(api_keys=("one", "two"), operator_key="operator")
#: Names of parameters and fields that may say which stored thing is meant.
_NAMES_SOMETHING = re.compile(r"(^|_)(id|ids|key|keys|identifier|salt|conversation|session|files?|batch)$")
_TEXT = {"prompt": "the quiet rain past the meadow", "max_tokens": 3, "ignore_eos": True}


@dataclass(frozen=True)
class Owned:
    """An id in a path, of something that belongs to a key.

    Attributes:
        make: makes one of key "one" and returns its id. unknown: one that nobody has.
    """

    make: Callable[[httpx.AsyncClient], Awaitable[str]]
    unknown: str


@dataclass(frozen=True)
class OperatorOnly:
    """A name that only the operator may say: others are told that alone, whether it is there or not."""

    known: str


@dataclass(frozen=True)
class Public:
    """A name of what is everyone's."""

    known: str


@dataclass(frozen=True)
class NeverLookedUp:
    """A field that chooses nothing stored: whatever it says, the engine is asked for the same, or all are refused.

    Attributes:
        body: of a request with this value of it.
    """

    body: Callable[[str], dict[str, Any]]


@dataclass(frozen=True)
class Salted(NeverLookedUp):
    """A field of the salt: the same value of two keys shares nothing."""


@dataclass(frozen=True)
class SaltOfTurns:
    """A header that says which stored turns of a key are meant: another key's with the same salt are not among them."""


async def _answer(
    client: httpx.AsyncClient, method: str, path: str, key: str, body: Any = None, **headers: str
) -> httpx.Response:
    return await client.request(method, path, json=body, headers={"Authorization": f"Bearer {key}"} | headers)


async def _sent(*asked: Any, **headers: str) -> dict[str, Any]:
    """What is answered with 200."""
    answer = await _answer(*asked, **headers)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def _watched(client: httpx.AsyncClient) -> str:
    return str((await _sent(client, "post", "/v1/completions", "one", _TEXT | {"millpond": {"watch": True}}))["id"])


async def _session(client: httpx.AsyncClient, **salt: str) -> str:
    await _sent(client, "post", "/v1/completions", "one", _TEXT | ({"cache_salt": salt[SALT]} if salt else {}))
    for _ in range(1000):
        if found := (await _sent(client, "get", "/v1/millpond/sessions", "one", **salt))["data"]:
            return str(found[0]["id"])
        await asyncio.sleep(0.01)
    raise AssertionError("no turn was stored")


def _chat(message: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [message, {"role": "user", "content": "w6"}], "max_tokens": 2}


def _called(value: str) -> dict[str, Any]:
    call = {"id": value, "type": "function", "function": {"name": "look", "arguments": "{}"}}
    return _chat({"role": "assistant", "content": "w5", "tool_calls": [call]})


def _said(path: str) -> dict[str, Any]:
    return {
        "/v1/completions": {"prompt": "w5"},
        "/v1/chat/completions": _chat({"role": "user", "content": "w5"}),
        "/v1/responses": {"input": "w5"},
        "/v1/messages": _chat({"role": "user", "content": "w5"}),
        "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "w5"}]},
        "/infill": {"input_prefix": "w5", "input_suffix": "w6", "n_predict": 2, "response_fields": ["content"]},
    }[path]


def _field(path: str, name: str) -> Callable[[str], dict[str, Any]]:
    return lambda value: _said(path) | {name: value}


def _blocks(path: str, block: str, role: str, name: str) -> Callable[[str], dict[str, Any]]:
    """A message of Anthropic's with a block that has an id."""
    more: dict[str, Any] = {"name": "look", "input": {}} if block == "tool_use" else {}
    last = {"role": "user", "content": "w6"}
    return lambda value: (
        _said(path) | {"messages": [{"role": role, "content": [{"type": block, name: value} | more]}, last]}
    )


_ANSWERS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/infill")
_ANTHROPIC = ("/v1/messages", "/v1/messages/count_tokens")
_MESSAGES: dict[str, Callable[[str], dict[str, Any]]] = {
    "messages.tool_call_id": lambda value: _chat({"role": "tool", "content": "w5", "tool_call_id": value}),
    "messages.tool_calls.id": _called,
}
ROWS: dict[Place, Owned | OperatorOnly | Public | NeverLookedUp | SaltOfTurns] = {
    ("get", "/v1/millpond/memory/{request_id}", "request_id"): Owned(_watched, "cmpl-" + "0" * 32),
    ("delete", "/v1/millpond/sessions/{session_id}", "session_id"): Owned(_session, "0" * 32),
    ("post", "/cluster/workers/{name}/drain", "name"): OperatorOnly("decode-0"),
    ("get", "/v1/models/{name}", "name"): Public("fake/counter"),
    ("post", "/v1/responses", "input.id"): NeverLookedUp(
        lambda value: {"input": [{"role": "user", "content": "w5", "id": value}]}
    ),
    ("post", "/v1/responses", "input.call_id"): NeverLookedUp(
        lambda value: {
            "input": [
                {"type": "function_call", "call_id": value, "name": "look", "arguments": "{}"},
                {"type": "function_call_output", "call_id": value, "output": "w5"},
            ]
        }
    ),
    ("post", "/v1/responses", "previous_response_id"): NeverLookedUp(_field("/v1/responses", "previous_response_id")),
    ("post", "/v1/responses", "conversation"): NeverLookedUp(_field("/v1/responses", "conversation")),
    **{("post", "/v1/chat/completions", name): NeverLookedUp(body) for name, body in _MESSAGES.items()},
    **{("post", "/tokenize", name): NeverLookedUp(body) for name, body in _MESSAGES.items()},
    **{
        ("post", path, name): NeverLookedUp(_field(path, name))
        for path in _ANSWERS
        for name in ("prompt_cache_key", "safety_identifier")
    },
    **{
        ("post", path, f"messages.content.{name}"): NeverLookedUp(_blocks(path, block, role, name))
        for path in _ANTHROPIC
        for block, role, name in (("tool_use", "assistant", "id"), ("tool_result", "user", "tool_use_id"))
    },
    **{
        ("post", path, name): NeverLookedUp(_field(path, name))
        for path in _ANTHROPIC
        for name in ("user_profile_id", "workspace_id")
    },
    **{("post", path, "cache_salt"): Salted(_field(path, "cache_salt")) for path in _ANSWERS},
    **{(method, "/v1/millpond/sessions", SALT): SaltOfTurns() for method in ("get", "delete")},
    ("delete", "/v1/millpond/sessions/{session_id}", SALT): SaltOfTurns(),
}


def _rows(*kinds: type) -> list[Any]:
    return [pytest.param(place, row, id=" ".join(place)) for place, row in ROWS.items() if type(row) in kinds]


def _with(llm: Any, work: Callable[[httpx.AsyncClient], Awaitable[None]]) -> None:
    async def run() -> None:
        transport = httpx.ASGITransport(create_app(llm, SETTINGS))
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as client:
            await work(client)

    asyncio.run(run())


def _with_engine(folder: Path, work: Callable[[httpx.AsyncClient], Awaitable[None]]) -> None:
    llm = mp.AsyncLLM("pond-recall", method="h2o", budget="50%", dtype="f32", cache_dir=folder)
    try:
        _with(llm, work)
    finally:
        asyncio.run(llm.close())


def _told(answer: httpx.Response, name: str) -> tuple[int, str]:
    """What is answered, without the name that was sent."""
    return answer.status_code, answer.text.replace(name, "NAME")


@pytest.mark.parametrize(("place", "row"), _rows(Owned))
def test_what_is_anothers_is_not_found(tmp_path: Path, place: Place, row: Owned) -> None:
    method, path, name = place

    async def work(client: httpx.AsyncClient) -> None:
        own = await row.make(client)

        async def told(key: str, value: str) -> tuple[int, str]:
            return _told(await _answer(client, method, path.replace(f"{{{name}}}", value), key), value)

        foreign = await told("two", own)
        assert foreign == await told("two", row.unknown)
        assert foreign[0] == 404
        assert (await told("one", own))[0] == 200

    _with_engine(tmp_path, work)


@pytest.mark.parametrize(("place", "row"), _rows(SaltOfTurns))
def test_a_salt_is_the_keys_own(tmp_path: Path, place: Place, row: SaltOfTurns) -> None:
    method, path, _ = place

    async def work(client: httpx.AsyncClient) -> None:
        own = await _session(client, **{SALT: "x"})
        at = path.replace("{session_id}", own)
        same, other = [await _answer(client, method, at, "two", **{SALT: salt}) for salt in ("x", "y")]
        assert _told(same, own) == _told(other, own)
        assert own not in same.text or same.status_code == 404
        listed = (await _sent(client, "get", "/v1/millpond/sessions", "one", **{SALT: "x"}))["data"]
        assert [one["id"] for one in listed] == [own]

    _with_engine(tmp_path, work)


@pytest.mark.parametrize(("place", "row"), _rows(OperatorOnly))
def test_names_of_the_operators_are_told_to_no_key(place: Place, row: OperatorOnly) -> None:
    method, path, name = place
    cluster = FakeCluster()

    async def work(client: httpx.AsyncClient) -> None:
        known, unknown = [
            _told(await _answer(client, method, path.replace(f"{{{name}}}", value), "one"), value)
            for value in (row.known, "nobody")
        ]
        assert known == unknown
        assert known[0] == 403

    _with(cluster, work)
    assert cluster.drained == []


@pytest.mark.parametrize(("place", "row"), _rows(Public))
def test_what_is_everyones_is_the_same_for_all(place: Place, row: Public) -> None:
    method, path, name = place

    async def work(client: httpx.AsyncClient) -> None:
        one, two = [await _sent(client, method, path.replace(f"{{{name}}}", row.known), key) for key in ("one", "two")]
        assert one == two

    _with(FakeLLM(), work)


@pytest.mark.parametrize(("place", "row"), _rows(NeverLookedUp, Salted))
def test_fields_choose_nothing_of_another_key(place: Place, row: NeverLookedUp) -> None:
    """Key "one" sends a value, then key "two" that value and a new one: the engine is asked for the same by both."""
    method, path, _ = place
    llm = templated()
    llm.tokenizer.add_tokens(["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"])

    async def work(client: httpx.AsyncClient) -> None:
        async def told(key: str, value: str) -> tuple[int, str]:
            answer = await _answer(client, method, path, key, row.body(value))
            own = json.loads(answer.text)
            return answer.status_code, "" if "id" in own else answer.text.replace(value, "VALUE")

        owner = await told("one", "known-value")
        assert await told("two", "known-value") == await told("two", "other-value") == owner
        assert owner[0] in (200, 400)

    _with(llm, work)
    if llm.asked:
        of_one, same, other = [replace(one, request_id="", client="") for one in llm.asked]
        assert replace(same, cache_salt=None) == replace(other, cache_salt=None) == replace(of_one, cache_salt=None)
        assert same.cache_salt != of_one.cache_salt
        assert (same.cache_salt == other.cache_salt) is (type(row) is not Salted)


def _places(document: dict[str, Any]) -> Iterator[Place]:
    """Every parameter of a path, and whatever else is named as if it chose something, in what a server describes."""
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            for parameter in operation.get("parameters", ()):
                if parameter["in"] == "path" or _NAMES_SOMETHING.search(parameter["name"].lower().replace("-", "_")):
                    yield method, path, parameter["name"]
            body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
            for name in _fields(document, body):
                yield method, path, name


def _fields(document: dict[str, Any], schema: dict[str, Any], above: str = "") -> Iterator[str]:
    if "$ref" in schema:
        schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    for part in (*schema.get("anyOf", ()), *schema.get("oneOf", ()), *schema.get("allOf", ()), schema.get("items", {})):
        if isinstance(part, dict) and part:
            yield from _fields(document, part, above)
    for name, inner in schema.get("properties", {}).items():
        if _NAMES_SOMETHING.search(name) and not name.endswith("token_ids"):
            yield above + name
        yield from _fields(document, inner, f"{above}{name}.")


def test_every_id_has_a_row() -> None:
    app = create_app(FakeCluster(), SETTINGS)
    found = set(_places(app.openapi()))
    assert found == set(ROWS), "a parameter or field that names something: say here whose it is"
    described = set(app.openapi()["paths"])
    hidden = {path for path, _ in all_routes(app) if "{" in path} - described
    assert not hidden, "a parameter of a path that the document leaves out"


def test_a_new_parameter_without_a_row_is_seen() -> None:
    app = create_app(FakeCluster(), SETTINGS)

    @app.get("/v1/batches/{batch_id}")
    async def batch(batch_id: str, file_id: str, layer: int) -> None: ...

    app.openapi_schema = None
    new = set(_places(FastAPI.openapi(app))) - set(ROWS)
    assert new == {("get", "/v1/batches/{batch_id}", name) for name in ("batch_id", "file_id")}


def test_without_keys_an_address_sees_its_own() -> None:
    async def work() -> list[int]:
        app = create_app(FakeLLM())
        asked = {"prompt": "w5", "max_tokens": 2, "millpond": {"watch": True}}
        clients = [
            httpx.AsyncClient(transport=httpx.ASGITransport(app, client=(host, 1)), base_url="http://test")
            for host in ("10.0.0.1", "10.0.0.2")
        ]
        name = (await clients[0].post("/v1/completions", json=asked)).json()["id"]
        return [(await client.get(f"/v1/millpond/memory/{name}")).status_code for client in clients]

    assert asyncio.run(work()) == [200, 404]


def test_a_request_that_waits_is_anothers_secret_too() -> None:
    app = create_app(FakeLLM(), SETTINGS)
    service = app.state.service

    async def work() -> list[int]:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            owner = service.clients._hash("one")
            with service.admission.admit(["waits"], owner):
                return [
                    (await _answer(client, "get", "/v1/millpond/memory/waits", key)).status_code
                    for key in ("one", "two")
                ]

    assert asyncio.run(work()) == [204, 404]
