"""Every kind of bad input is refused at once, in OpenAI's shape, with the numbers; and nothing reaches the engine."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from millpond.errors import (
    BudgetError,
    CacheMismatchError,
    DataError,
    MillpondError,
    NumericsError,
    OptionError,
    PoolFullError,
    UnsupportedModelError,
)
from millpond.server.settings import ServerSettings
from server.test_completions import ask, events
from tests.helpers.server.fake import FakeLLM, client_of

HUGE = 10**30


def send(content: bytes, llm: FakeLLM | None = None, headers: dict[str, str] | None = None, **settings: Any) -> Any:
    async def work() -> httpx.Response:
        async with client_of(llm or FakeLLM(), **settings) as client:
            kind = {"Content-Type": "application/json"}
            return await client.post("/v1/completions", content=content, headers=kind | (headers or {}))  # type: ignore[no-any-return]

    return asyncio.run(work())


@pytest.mark.parametrize(
    ("body", "status", "code", "words"),
    [
        ({}, 400, "invalid_value", "prompt"),
        (
            {"prompt": "w5", "model": "other"},
            404,
            "model_not_found",
            "'other' is not here; this server has 'fake/counter'",
        ),
        ({"prompt": {"a": 1}}, 400, "invalid_value", "list of token ids"),
        ({"prompt": []}, 400, "empty_prompt", "no token"),
        ({"prompt": [[1, 5], []]}, 400, "empty_prompt", "no token"),
        ({"prompt": [5, 96]}, 400, "invalid_token", "96: the model's tokens are 0 to 95"),
        ({"prompt": [-1]}, 400, "invalid_value", "prompt"),
        ({"prompt": [HUGE]}, 400, "invalid_value", "prompt"),
        (
            {"prompt": [5] * 64},
            400,
            "context_length_exceeded",
            "64 tokens of prompt and 16 new ones are 80; the model's context holds 64: shorten the prompt",
        ),
        (
            {"prompt": [5] * 60, "max_tokens": 5},
            400,
            "context_length_exceeded",
            "65; the model's context holds 64: ask for at ",
        ),
        ({"prompt": [5] * 60, "max_tokens": 5}, 400, "context_length_exceeded", "at most 4 new tokens, or shorten the"),
        ({"prompt": "w5", "max_tokens": HUGE}, 400, "context_length_exceeded", "the model's context holds 64"),
        ({"prompt": "w5", "max_tokens": -1}, 400, "invalid_value", "max_tokens"),
        ({"prompt": "w5", "max_tokens": 1.5}, 400, "invalid_value", "max_tokens"),
        ({"prompt": "w5", "n": 0}, 400, "invalid_value", "n: "),
        ({"prompt": "w5", "n": 129}, 400, "invalid_value", "n: "),
        ({"prompt": "w5", "best_of": 3}, 400, "unsupported_parameter", "best_of=3"),
        ({"prompt": "w5", "best_of": 1, "n": 2}, 400, "unsupported_parameter", "n=2"),
        (
            {"prompt": "w5", "suffix": "x"},
            400,
            "unsupported_parameter",
            "needs a model with tokens for text in the middle",
        ),
        ({"prompt": "w5", "temprature": 1}, 400, "unknown_parameter", "did you mean 'temperature'?"),
        ({"prompt": "w5", "temperature": -0.1}, 400, "invalid_value", "temperature"),
        ({"prompt": "w5", "temperature": HUGE}, 400, "invalid_value", "temperature"),
        ({"prompt": "w5", "top_p": 0}, 400, "invalid_value", "top_p"),
        ({"prompt": "w5", "seed": HUGE}, 400, "invalid_value", "seed"),
        ({"prompt": "w5", "logprobs": 21}, 400, "invalid_value", "logprobs"),
        ({"prompt": "w5", "stop": ""}, 400, "invalid_value", "stop"),
        ({"prompt": "w5", "stop": ["x"] * 17}, 400, "invalid_value", "stop"),
        ({"prompt": "w5", "logit_bias": {"a": 1}}, 400, "invalid_value", "logit_bias"),
        ({"prompt": "w5", "logit_bias": {"3": 101}}, 400, "invalid_value", "logit_bias"),
        ({"prompt": "w5", "logit_bias": {"96": 1}}, 400, "invalid_token", "96"),
        ({"prompt": "w5", "stop_token_ids": [96]}, 400, "invalid_token", "96"),
        ({"prompt": "w5", "millpond": {"method": "h20"}}, 400, "invalid_value", "did you mean 'h2o'"),
        ({"prompt": "w5", "millpond": {"metod": "h2o"}}, 400, "unknown_parameter", "did you mean 'method'?"),
        ({"prompt": "w5", "structured_outputs": {"regx": "a"}}, 400, "unknown_parameter", "did you mean 'regex'?"),
        ({"prompt": "w5", "millpond": {"deadline_s": 0}}, 400, "invalid_value", "deadline_s"),
        ({"prompt": "w5", "millpond": {"budget": True}}, 400, "invalid_value", "budget"),
        ({"prompt": "w5", "millpond": None}, 400, "invalid_value", "millpond"),
        ({"prompt": "\ud800"}, 400, "invalid_json", "the body is not JSON"),
        ({"prompt": "w5", "\ud800": 1}, 400, "invalid_json", "the body is not JSON"),
        ({"prompt": "w5", "model": "\ud800"}, 400, "invalid_json", "the body is not JSON"),
    ],
    ids=lambda value: json.dumps(value)[:60] if isinstance(value, dict) else None,
)
def test_a_field_that_cannot_be_obeyed(body: dict[str, Any], status: int, code: str, words: str) -> None:
    llm = FakeLLM()
    found = send(json.dumps(body).encode(), llm)
    error = found.json()["error"]
    assert (found.status_code, error["code"]) == (status, code)
    assert words in error["message"]
    assert set(error) == {"message", "type", "param", "code"}
    assert llm.asked == []


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b'"w5"',
        b"[1]",
        b"null",
        b"\xff\xfe",
        b"[" * 1_000,
        b'{"prompt": "w5", "seed": ' + b"9" * 5_000 + b"}",
        b'{"prompt": "w5", "temperature": NaN}',
        b'{"prompt": "w5", "temperature": 1e999}',
    ],
    ids=lambda content: repr(content[:24]),
)
def test_a_body_that_is_no_request(content: bytes) -> None:
    found = send(content)
    assert found.status_code == 400
    assert found.json()["error"]["type"] == "invalid_request_error"


def test_a_form_is_no_request() -> None:
    found = send(b'{"prompt": "w5"}', headers={"Content-Type": "text/plain"})  # what any web page may send
    assert found.status_code == 400
    assert "application/json" in found.json()["error"]["message"]


def test_a_body_that_is_too_long_is_not_read() -> None:
    found = send(b'{"prompt": "' + b"w5 " * 400 + b'"}', max_body_bytes=1_000)
    assert (found.status_code, found.json()["error"]["code"]) == (413, "body_too_large")
    assert "1,000" in found.json()["error"]["message"]


def test_a_body_without_a_length_is_not_read() -> None:
    async def parts() -> Any:
        for _ in range(100):
            yield b" " * 100

    async def work() -> httpx.Response:
        async with client_of(FakeLLM(), max_body_bytes=1_000) as client:
            return await client.post("/tokenize", content=parts())  # type: ignore[no-any-return]

    found = asyncio.run(work())
    assert (found.status_code, found.json()["error"]["code"]) == (411, "length_required")


def test_the_server_has_a_limit_of_tokens() -> None:
    found = ask({"prompt": "w5", "max_tokens": 9}, max_tokens=8)
    assert (found.status_code, found.json()["error"]["param"]) == (400, "max_tokens")
    assert "at most 8" in found.json()["error"]["message"]


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (OptionError("a"), 400, "invalid_value"),
        (DataError("a"), 500, "file_failed"),
        (BudgetError("a"), 422, "budget_impossible"),
        (PoolFullError("a"), 422, "kv_memory_exceeded"),
        (UnsupportedModelError("a"), 422, "unsupported"),
        (CacheMismatchError("a"), 500, "engine_failed"),
        (NumericsError("a"), 500, "engine_failed"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, MillpondError) else None,
)
def test_errors_of_the_engine_have_a_status(error: MillpondError, status: int, code: str) -> None:
    llm = FakeLLM()
    llm.fails = error
    found = ask({"prompt": ["w5", "w6"], "max_tokens": 3}, llm)
    assert (found.status_code, found.json()["error"]["code"]) == (status, code)
    assert llm.running == set()
    stream = ask({"prompt": "w5", "max_tokens": 3, "stream": True}, llm)  # after a token: the status is long sent
    assert stream.status_code == 200
    assert json.loads(stream.text.strip().split("data: ")[-1])["error"]["code"] == code


def test_a_stream_that_is_refused_has_a_status() -> None:
    found = ask({"prompt": "w5", "stream": True, "millpond": {"method": "h20"}})
    assert found.status_code == 400


def test_a_deadline_returns_what_there_is() -> None:
    llm = FakeLLM()
    llm.open.clear()

    async def work() -> tuple[Any, Any, Any]:
        async with client_of(llm) as client:
            body = {"prompt": "w5", "max_tokens": 5, "millpond": {"deadline_s": 0.05}}
            none = await client.post("/v1/completions", json=body)
            stream = await client.post("/v1/completions", json=body | {"stream": True})
            list_ = await client.post("/v1/completions", json=body | {"prompt": ["w5", "w6"]})
            return none, stream, list_

    none, stream, list_ = asyncio.run(work())
    for found in (none, stream):
        assert (found.status_code, found.json()["error"]["code"]) == (408, "deadline_exceeded")
        assert found.headers["Retry-After"] == "1"
    assert [choice["millpond"]["finish_reason"] for choice in list_.json()["choices"]] == ["deadline", "deadline"]
    assert [choice["finish_reason"] for choice in list_.json()["choices"]] == ["length", "length"]


def test_a_request_that_was_cancelled_returns_what_it_has() -> None:
    llm = FakeLLM()
    llm.reason = "cancelled"
    (piece, *_, last) = events(ask({"prompt": "w5", "max_tokens": 3, "stream": True}, llm).text)
    assert piece["choices"][0]["finish_reason"] is None
    assert last["choices"][0]["finish_reason"] == "length"
    assert last["choices"][0]["millpond"]["finish_reason"] == "cancelled"


@pytest.mark.parametrize("method", ["GET", "PUT"])
def test_other_methods_and_paths(method: str) -> None:
    async def work() -> tuple[Any, Any]:
        async with client_of(FakeLLM()) as client:
            return await client.request(method, "/v1/completions"), await client.request(method, "/v1/nothing")

    wrong, nowhere = asyncio.run(work())
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")
    assert wrong.json()["error"]["message"] == f"'/v1/completions' does not take {method}; it takes POST"
    assert (nowhere.status_code, nowhere.json()["error"]["code"]) == (404, "not_found")
    assert "no address '/v1/nothing' here; GET /openapi.json" in nowhere.json()["error"]["message"]


@pytest.mark.parametrize(
    "bad",
    [
        {"max_queue": 0},
        {"max_tokens": 0},
        {"max_body_bytes": -1},
        {"timeout_s": 0.0},
        {"timeout_s": float("nan")},
        {"drain_s": -1.0},
        {"header_timeout_s": 0.0},
        {"body_timeout_s": float("inf")},
        {"max_connections": 0},
        {"max_bytes_under_way": 10},
        {"api_keys": ("a", " ")},
    ],
)
def test_settings_are_checked(bad: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        ServerSettings(**bad)


def test_a_preset_decides_what_it_decides() -> None:
    async def work() -> list[Any]:
        llm = FakeLLM()
        async with client_of(llm) as client:
            found = []
            for millpond in ({"preset": "tiny"}, {"preset": "tiny", "method": "h2o"}, {"preset": "tony"}):
                body = {"messages": [{"role": "user", "content": "w5"}], "millpond": millpond, "max_tokens": 2}
                found.append(await client.post("/v1/chat/completions", json=body))
            return [*found, llm.asked[0].cache]

    fine, twice, unknown, kept = asyncio.run(work())
    assert (fine.status_code, kept.preset, kept.method, kept.budget) == (200, "tiny", None, None)
    assert (twice.status_code, twice.json()["error"]["param"]) == (400, "millpond.method")
    assert unknown.status_code == 400
    assert "did you mean 'tiny'" in unknown.json()["error"]["message"]
