"""Models, tokens, health, metrics, memory, keys."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from millpond.methods import METHODS
from tests.helpers.server.fake import FakeLLM, client_of


def get(path: str, llm: FakeLLM | None = None, headers: dict[str, str] | None = None, **settings: Any) -> Any:
    async def work() -> Any:
        async with client_of(llm or FakeLLM(), **settings) as client:
            return await client.get(path, headers=headers)

    return asyncio.run(work())


def post(path: str, body: dict[str, Any]) -> Any:
    async def work() -> Any:
        async with client_of(FakeLLM()) as client:
            return await client.post(path, json=body)

    return asyncio.run(work())


def test_the_model_tells_how_it_keeps_its_cache() -> None:
    (model,) = get("/v1/models").json()["data"]
    assert model["id"] == "fake/counter"
    assert get("/v1/models/fake/counter").json()["id"] == "fake/counter"
    assert get("/v1/models/other").status_code == 404
    told = model["millpond"]
    assert (told["method"], told["budget"], told["context_length"], told["chat_template"]) == (
        "h2o",
        "20%",
        64,
        "plain",
    )
    assert told["methods"] == METHODS.names()


def test_tokens_there_and_back() -> None:
    found = post("/tokenize", {"prompt": "w5 w6"}).json()
    assert found == {"tokens": [1, 5, 6], "count": 3, "max_model_len": 64}
    assert post("/tokenize", {"prompt": "w5 w6", "add_special_tokens": False}).json()["tokens"] == [5, 6]
    assert post("/tokenize", {"messages": [{"role": "user", "content": "w5"}]}).json()["count"] == 4
    assert post("/detokenize", {"tokens": [1, 5, 6]}).json() == {"prompt": "<bos> w5 w6"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "w5"}]}),
        ("/tokenize", {"prompt": "a", "model": "b"}),
        ("/detokenize", {"tokens": [96]}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": "5"}),
    ],
)
def test_what_is_no_text_and_no_token(path: str, body: dict[str, Any]) -> None:
    assert post(path, body).status_code in (400, 404)


def test_metrics_are_prometheus_and_true() -> None:
    async def work() -> str:
        async with client_of(FakeLLM()) as client:
            for n in (1, 4):
                await client.post("/v1/completions", json={"prompt": "w5", "max_tokens": n})
            await client.post("/v1/completions", json={"prompt": "w5", "n": 0})
            await client.get("/nowhere")
            return str((await client.get("/metrics")).text)

    samples = {}
    for family in text_string_to_metric_families(asyncio.run(work())):
        assert family.documentation
        for sample in family.samples:
            samples[sample.name, *sample.labels.values()] = sample.value
    assert samples["millpond_kv_used_bytes",] == 500
    assert samples["millpond_kv_saved_bytes",] == 1500
    assert samples["millpond_kv_limit_bytes",] == 4000
    assert samples["millpond_requests_running",] == 0
    assert samples["millpond_requests_finished_total",] == 2
    assert samples["millpond_prefix_hit_tokens_total",] == 9
    assert samples["millpond_answers_total", "length"] == 2
    assert samples["millpond_time_to_first_token_seconds_count",] == 2
    assert samples["millpond_time_per_output_token_seconds_count",] == 1  # one token has none after the first
    assert samples["millpond_http_requests_total", "/v1/completions", "200"] == 2
    assert samples["millpond_http_requests_total", "/v1/completions", "400"] == 1
    assert samples["millpond_http_requests_total", "other", "404"] == 1


def test_two_servers_in_one_process_count_apart() -> None:
    get("/health")
    assert 'path="/health"' not in get("/metrics").text


def test_memory_of_a_request() -> None:
    async def work() -> tuple[Any, ...]:
        llm = FakeLLM()
        async with client_of(llm) as client:
            body = {"prompt": "w5", "max_tokens": 2, "millpond": {"watch": True}}
            name = (await client.post("/v1/completions", json=body)).json()["id"]
            unwatched = (await client.post("/v1/completions", json={"prompt": "w5"})).json()["id"]
            path = f"/v1/millpond/memory/{name}"
            return (
                await client.get(path),
                await client.get(f"{path}?layer=1&since=3"),
                await client.get(f"{path}?layer=9"),
                await client.get(f"/v1/millpond/memory/{unwatched}"),
                await client.get(f"{path}?layer=-1"),
            )

    found, later, no_layer, unknown, negative = asyncio.run(work())
    shown = found.json()
    assert (shown["layer"], shown["n_layers"], shown["n_kv_heads"]) == (0, 2, 2)
    assert shown["texts"] == ["<bos>", "w2", "w3", "w4"]
    assert shown["kept"] == [1.0, 0.0, 0.5, 1.0]
    assert shown["scores"] == [2.0, None, 0.3333, 3.142]
    assert (shown["kv_bytes"], shown["full_kv_bytes"]) == (200, 400)
    assert (later.json()["layer"], later.json()["texts"]) == (1, ["w4"])
    assert (no_layer.status_code, unknown.status_code, negative.status_code) == (400, 404, 400)


KEYS: dict[str, Any] = {"api_keys": ("one", "zwö")}


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/openapi.json", "/nowhere", "/v1/millpond/memory/x"])
def test_nothing_is_told_without_a_key(path: str) -> None:
    for given in (None, {"Authorization": "Bearer two"}, {"Authorization": "one"}, {"Authorization": "Basic one"}):
        found = get(path, headers=given, **KEYS)
        assert (found.status_code, found.json()["error"]["type"]) == (401, "authentication_error")
        wrong = given is not None and given["Authorization"].startswith("Bearer")
        said = "the API key is not one of this server's" if wrong else "this server asks for an API key"
        assert found.json()["error"]["message"].startswith(said)
        assert found.headers["WWW-Authenticate"] == "Bearer"
    assert get(path, headers={"Authorization": "Bearer one"}, **KEYS).status_code != 401


@pytest.mark.parametrize("path", ["/", "/page/style.css", "/page/main.js", "/health"])
def test_the_page_and_the_health_need_no_key(path: str) -> None:
    assert get(path, **KEYS).status_code == 200


def test_a_key_beyond_ascii() -> None:
    assert get("/v1/models", headers={"Authorization": "bearer zwö".encode()}, **KEYS).status_code == 200  # type: ignore[dict-item]
