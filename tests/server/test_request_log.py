"""A line per request: route, status, tokens and speed; and nothing of what anyone said or is called."""

from __future__ import annotations

import asyncio
import logging
import re
from typing import Any

import pytest

from millpond.errors import MillpondError
from millpond.server.request_log import LOG
from tests.helpers.server.fake import FakeLLM, client_of

BODY = {"prompt": "w5 w6", "max_tokens": 3}


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    caplog.set_level(logging.INFO, LOG.name)
    LOG.propagate = True

    class Lines(list[str]):
        def __iter__(self) -> Any:
            return iter([record.getMessage() for record in caplog.records if record.name == LOG.name])

    return Lines()


def send(
    method: str, path: str, body: Any = None, llm: FakeLLM | None = None, headers: Any = None, **settings: Any
) -> Any:
    async def work() -> Any:
        async with client_of(llm or FakeLLM(), **settings) as client:
            return await client.request(method, path, json=body, headers=headers)

    return asyncio.run(work())


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_is_a_line_with_its_numbers(lines: list[str], stream: bool) -> None:
    send("POST", "/v1/completions", BODY | {"stream": stream})
    (line,) = lines
    pattern = (
        r"POST /v1/completions 200, 3 prompt tokens \(3 cached\), 3 generated, first token after \d+\.\d\d s, "
        r"(\d+\.\d tokens/s, )?\d+\.\d\d s"
    )
    assert re.fullmatch(pattern, line), line


def test_all_prompts_of_a_request_count(lines: list[str]) -> None:
    send("POST", "/v1/completions", BODY | {"prompt": ["w5 w6", "w7"], "n": 2})
    assert "5 prompt tokens (6 cached), 12 generated" in next(iter(lines))


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "route"),
    [
        ("POST", "/v1/completions", {"prompt": 5}, "400 invalid_value", "/v1/completions"),
        ("POST", "/v1/completions", BODY | {"temprature": 1}, "400 unknown_parameter", "/v1/completions"),
        ("POST", "/v1/messages", {}, "400 invalid_value", "/v1/messages"),
        ("GET", "/v1/models", None, "200", "/v1/models"),
        ("POST", "/v1/models", None, "405 method_not_allowed", "/v1/models"),
        ("GET", "/private/secret", None, "404 not_found", "(no route)"),
        ("GET", "/v1/millpond/memory/secret", None, "404 request_not_found", "/v1/millpond/memory/{request_id}"),
        ("GET", "/v1/models/secret", None, "404 model_not_found", "/v1/models/{name:path}"),
    ],
)
def test_refusals_are_lines_without_what_was_sent(
    lines: list[str], method: str, path: str, body: Any, status: str, route: str
) -> None:
    send(method, path, body)
    (line,) = lines
    assert line.startswith(f"{method} {route} {status}, ")
    assert "secret" not in line


def test_nothing_of_keys_texts_and_strange_methods_is_logged(lines: list[str]) -> None:
    headers = {"Authorization": "Bearer hidden", "x-api-key": "hidden"}
    send("POST", "/v1/completions?q=hidden", BODY | {"user": "hidden", "cache_salt": "hidden"}, headers=headers)
    send("POST", "/v1/completions", BODY, headers={"Authorization": "Bearer other"}, api_keys=("hidden",))
    send("HIDDEN", "/v1/completions%0a%1b[31m")
    text = "\n".join(lines)
    assert len(text.splitlines()) == 3
    assert "hidden" not in text.lower().replace("(other)", "")
    assert "\x1b" not in text
    assert "401 invalid_api_key" in text


def test_what_is_polled_is_logged_only_where_it_fails(lines: list[str]) -> None:
    for path in ("/health", "/metrics"):
        send("GET", path)
    assert list(lines) == []
    llm = FakeLLM()
    llm.hangs = "one step takes long"
    send("GET", "/health", llm=llm)
    assert [line[:15] for line in lines] == ["GET /health 503"]


def test_a_failure_in_a_stream_is_a_line_without_numbers(lines: list[str]) -> None:
    llm = FakeLLM()
    llm.fails = MillpondError("broken")
    send("POST", "/v1/completions", BODY | {"stream": True}, llm)
    (line,) = lines
    assert re.fullmatch(r"POST /v1/completions 200 engine_failed, \d+\.\d\d s", line)


def test_without_a_listener_nothing_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, LOG.name)
    send("POST", "/v1/completions", BODY)
    assert not [record for record in caplog.records if record.name == LOG.name]
