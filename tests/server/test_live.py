"""Over real connections: clients that go away, a full queue, a server that goes down, OpenAI's own client."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.helpers.server.fake import FakeLLM
from tests.helpers.server.live import Live, live, until

BODY = {"prompt": "w5", "max_tokens": 5}


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(FakeLLM, max_queue=64) as running:
        yield running


@pytest.fixture(autouse=True)
def opened(server: Live) -> None:
    server.llm.open.set()
    server.llm.ended.clear()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompts", [1, 3])
def test_a_client_that_goes_away_leaves_nothing_behind(server: Live, stream: bool, prompts: int) -> None:
    server.llm.open.clear()
    body = BODY | {"prompt": ["w5"] * prompts, "stream": stream}

    async def leave_while_it_runs() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=30) as client, asyncio.timeout(30):
            asked = asyncio.create_task(client.post("/v1/completions", json=body))
            while len(server.llm.running) < prompts:
                await asyncio.sleep(0.005)
            asked.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asked

    asyncio.run(leave_while_it_runs())
    until(lambda: not server.llm.running)
    assert list(server.llm.ended.values()) == ["closed"] * prompts
    until(lambda: not server.server._service.admission.under_way)


def test_a_client_that_goes_away_in_the_middle_of_a_stream(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.llm, "free", 2)
    server.llm.open.clear()
    body = BODY | {"stream": True}
    with server.client() as client, client.stream("POST", "/v1/completions", json=body) as answer:
        assert next(answer.iter_lines()).startswith("data: ")
    until(lambda: bool(server.llm.ended))
    assert list(server.llm.ended.values()) == ["closed"]
    with server.client() as client:
        assert "millpond_clients_left_total 0.0" not in client.get("/metrics").text


def test_a_full_queue_says_when_to_come_again() -> None:
    with live(FakeLLM, max_queue=2) as server:
        server.llm.open.clear()
        with server.client() as client:
            threads = [
                threading.Thread(target=client.post, args=("/v1/completions",), kwargs={"json": BODY}) for _ in "ab"
            ]
            for thread in threads:
                thread.start()
            until(lambda: len(server.llm.running) == 2)
            refused = client.post("/v1/completions", json=BODY)
            error = refused.json()["error"]
            assert (refused.status_code, error["type"], error["code"]) == (429, "rate_limit_error", "queue_full")
            assert int(refused.headers["Retry-After"]) >= 1
            too_many = client.post("/v1/completions", json=BODY | {"prompt": ["w5"] * 3})
            assert (too_many.status_code, too_many.json()["error"]["code"]) == (400, "too_many_prompts")
            server.soon(server.llm.open.set)
            for thread in threads:
                thread.join(10)
            assert client.post("/v1/completions", json=BODY).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_server_that_goes_down_lets_the_running_finish(stream: bool) -> None:
    server = Live(FakeLLM)
    server.llm.open.clear()
    found: list[httpx.Response] = []
    with server.client() as client:
        asked = threading.Thread(
            target=lambda: found.append(client.post("/v1/completions", json=BODY | {"stream": stream}))
        )
        asked.start()
        until(lambda: bool(server.llm.running))
        server.signal()
        until(lambda: server.server._service.admission.draining)
        server.soon(server.llm.open.set)
        asked.join(10)
    server.thread.join(10)
    assert not server.thread.is_alive()
    assert found[0].status_code == 200
    assert "w9" in found[0].text
    assert server.llm.closed


def test_a_server_that_goes_down_returns_what_does_not_finish() -> None:
    server = Live(FakeLLM, drain_s=0.1)
    server.llm.open.clear()
    server.llm.free = 2
    pieces: list[dict[str, Any]] = []

    def listen() -> None:
        body = BODY | {"stream": True}
        with server.client() as client, client.stream("POST", "/v1/completions", json=body) as answer:
            pieces.extend(json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {"))

    listener = threading.Thread(target=listen)
    listener.start()
    until(lambda: bool(server.llm.running))
    server.stop()
    listener.join(10)
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == " w6 w7"
    assert pieces[-1]["choices"][0]["millpond"]["finish_reason"] == "cancelled"
    assert server.llm.running == set()


def test_nobody_comes_in_while_it_goes_down() -> None:
    server = Live(FakeLLM)
    with server.client() as client:
        assert client.get("/health").status_code == 200
        server.server._service.admission.draining = True
        refused = client.post("/v1/completions", json=BODY)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
        assert "Retry-After" in refused.headers
        assert client.get("/health").status_code == 503
    server.stop()


def test_many_clients_of_all_kinds_and_none_is_lost(server: Live) -> None:
    chance = random.Random(7)

    async def one(client: httpx.AsyncClient, number: int) -> str:
        body = {"prompt": [1, 2 + number % 90], "max_tokens": chance.randint(1, 30), "stream": number % 2 == 0}
        patience = 0.001 * chance.randint(1, 40) if number % 3 == 0 else 30
        try:
            answer = await client.post("/v1/completions", json=body, timeout=patience)
        except httpx.TimeoutException:
            return "left"
        return "answered" if answer.status_code == 200 else str(answer.status_code)

    async def all_() -> list[str]:
        limits = httpx.Limits(max_connections=50)
        async with httpx.AsyncClient(base_url=server.url, limits=limits) as client:
            return await asyncio.gather(*(one(client, number) for number in range(200)))

    outcomes = asyncio.run(all_())
    assert set(outcomes) <= {"answered", "left", "429"}
    assert outcomes.count("answered") > 50
    until(lambda: not server.llm.running and not server.server._service.admission.under_way)


def test_openais_client(server: Live) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    with client:
        assert [model.id for model in client.models.list()] == ["fake/counter"]
        assert client.models.retrieve("fake/counter").id == "fake/counter"
        done = client.completions.create(model="fake/counter", prompt="w5 w6", max_tokens=3, logprobs=1)
        assert done.choices[0].text == " w7 w8 w9"
        assert done.choices[0].logprobs is not None
        said: Any = [{"role": "user", "content": "w5"}]
        answer = client.chat.completions.create(
            model="fake/counter",
            messages=said,
            max_tokens=3,
            logprobs=True,
            top_logprobs=1,
            extra_body={"millpond": {"method": "snapkv", "budget": 512}},
        )
        assert answer.choices[0].message.content
        assert answer.usage is not None
        assert answer.usage.model_extra is not None
        assert answer.usage.model_extra["millpond"]["kv_bytes"] > 0
        assert server.llm.asked[-1].cache.method == "snapkv"
        text, usage = "", None
        for chunk in client.chat.completions.create(
            model="fake/counter", messages=said, max_tokens=3, stream=True, stream_options={"include_usage": True}
        ):
            text += chunk.choices[0].delta.content or "" if chunk.choices else ""
            usage = chunk.usage or usage
        assert text == answer.choices[0].message.content
        assert usage is not None
        assert usage.completion_tokens == 3
        with pytest.raises(openai.NotFoundError, match="other"):
            client.completions.create(model="other", prompt="w5")
        with pytest.raises(openai.BadRequestError, match="tokens for text in the middle"):
            client.completions.create(model="fake/counter", prompt="w5", suffix="x")
