"""The real engine behind real connections: answers as the model gives them, and pages that come back."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import openai
import pytest
import torch

import millpond as mp
from millpond.engine.async_llm import AsyncLLM
from tests.helpers.evals.small import text, tiny_model, tiny_tokenizer
from tests.helpers.server.live import Live, live, until

LIMIT = 2**20


def engine() -> AsyncLLM:
    # a budget in tokens: a share of a few tokens is below what h2o protects, and it warns
    return AsyncLLM(
        tiny_model(), tokenizer=tiny_tokenizer(), model_name="tiny", kv_memory=LIMIT, max_step_tokens=64, budget=16
    )


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(engine) as running:
        yield running


def post(server: Live, body: dict[str, Any], path: str = "/v1/completions") -> Any:
    with server.client() as client:
        answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def is_empty(server: Live) -> bool:
    stats = server.llm.stats()
    return not (stats.running or stats.waiting or stats.swapped or stats.kv_bytes)


@pytest.mark.parametrize("method", ["full", "h2o"])
def test_answers_are_those_of_generate(server: Live, method: str) -> None:
    prompts = [text(40, seed) for seed in range(3)]
    kept: dict[str, Any] = {"method": method} | ({"budget": 16} if method == "h2o" else {})
    body = {"prompt": prompts, "max_tokens": 12, "temperature": 0, "skip_special_tokens": False, "millpond": kept}
    choices = post(server, body)["choices"]
    tokenizer, model = tiny_tokenizer(), tiny_model()
    for prompt, choice in zip(prompts, choices, strict=True):
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        with mp.compress(model, method, kept.get("budget")) as cache:
            out = model.generate(ids, cache=cache, max_new_tokens=12, do_sample=False)
        assert choice["text"].split() == tokenizer.decode(out[0, ids.shape[1] :]).split()
        if method == "h2o":
            assert choice["millpond"]["held"] == 16
            assert choice["millpond"]["kv_bytes"] < choice["millpond"]["full_kv_bytes"]


def test_scores_are_the_models_own(server: Live) -> None:
    """What lm-eval's local-completions asks for, against log probabilities taken from the model itself."""
    rows = [tiny_tokenizer()(text(length, length))["input_ids"] for length in (5, 20, 33)]
    body = {"prompt": rows, "max_tokens": 1, "logprobs": 1, "echo": True, "temperature": 0, "seed": 1234}
    choices = post(server, body)["choices"]
    for ids, choice in zip(rows, choices, strict=True):
        with torch.no_grad():
            logprobs = tiny_model()(torch.tensor([ids])).logits[0].float().log_softmax(-1)
        told = choice["logprobs"]
        assert told["token_logprobs"][0] is None
        expected = [float(logprobs[i, token]) for i, token in enumerate(ids[1:])]
        assert told["token_logprobs"][1:-1] == pytest.approx(expected, abs=1e-4)
        names = [tiny_tokenizer().decode([int(logprobs[i].argmax())]) for i in range(len(ids) - 1)]
        assert [max(top, key=top.get) for top in told["top_logprobs"][1:-1]] == names


def test_a_stream_of_openais_client_is_the_whole_answer(server: Live) -> None:
    said: Any = [{"role": "user", "content": text(30, 3)}]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        whole = client.chat.completions.create(model="tiny", messages=said, max_tokens=20, temperature=0)
        pieces = client.chat.completions.create(model="tiny", messages=said, max_tokens=20, temperature=0, stream=True)
        assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == whole.choices[0].message.content


def test_memory_is_told_while_it_is_written_and_afterwards(server: Live) -> None:
    body = {
        "prompt": text(60, 1),
        "max_tokens": 200,
        "stream": True,
        "temperature": 0,
        "ignore_eos": True,
        "millpond": {"watch": True, "budget": 32},
    }
    with server.client() as client, client.stream("POST", "/v1/completions", json=body) as answer:
        lines = (line for line in answer.iter_lines() if line.startswith("data: {"))
        name = json.loads(next(lines)[6:])["id"]
        during = client.get(f"/v1/millpond/memory/{name}").json()
        for _ in lines:
            pass
        after = client.get(f"/v1/millpond/memory/{name}?layer=1&since=259").json()
    assert sum(during["kept"]) == 32
    assert len(during["texts"]) == len(during["kept"]) == during["seen"] < 260
    assert (after["layer"], after["seen"], sum(after["kept"]), len(after["texts"])) == (1, 260, 32, 1)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_its_pages(server: Live, stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"prompt": [text(50, 1), text(50, 2)], "max_tokens": 400, "ignore_eos": True, "stream": stream}
    before = server.llm.stats().generated_tokens
    client_left, step = threading.Event(), server.llm._engine.step

    def stepped() -> Any:
        """A step; behind the first tokens it waits, so that no answer is done before its client leaves."""
        if server.llm.stats().generated_tokens > before + 20:
            client_left.wait(10)
        return step()

    monkeypatch.setattr(server.llm._engine, "step", stepped)
    with server.client() as client, ExitStack() as leaving:
        leaving.callback(client_left.set)
        if stream:
            with client.stream("POST", "/v1/completions", json=body) as answer:
                lines = answer.iter_lines()  # held: the connection closes with it
                next(lines)
                until(lambda: server.llm.stats().kv_bytes > 0)  # they are told behind a step, its tokens within it
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post("/v1/completions", json=body, timeout=1.0)
    until(lambda: is_empty(server))
    assert server.llm.stats().generated_tokens < before + 800


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"millpond": {"method": "full"}, "prompt": [5] * 400, "max_tokens": 100, "n": 40}, 422, "1,048,576"),
        ({"prompt": [5] * 600}, 400, "the model's context holds 512"),
        ({"prompt": [5], "millpond": {"budget": "3 apples"}}, 400, "budget '3 apples'"),
        ({"prompt": [5], "millpond": {"codec": "int99"}}, 400, "int99"),
        ({"prompt": [5], "millpond": {"codec": {"0": "int98"}}}, 400, "int98"),
        ({"prompt": [5], "millpond": {"codec": {"0-999": "int8"}}}, 400, "names layer 999"),
        ({"prompt": [5], "millpond": {"options": {"recnt": 1}}}, 400, "did you mean 'recent'"),
        ({"prompt": [5], "millpond": {"method": "full", "budget": 5}}, 422, "takes no budget"),
        ({"prompt": [5], "millpond": {"method": "kvzip"}}, 400, "kvzip"),
    ],
)
def test_what_the_engine_refuses_has_a_status_and_the_numbers(
    server: Live, body: dict[str, Any], status: int, words: str
) -> None:
    with server.client() as client:
        answer = client.post("/v1/completions", json=body)
    assert (answer.status_code, words in answer.json()["error"]["message"]) == (status, True), answer.text


def test_many_requests_of_all_kinds_and_none_is_lost(server: Live) -> None:
    outcomes = asyncio.run(storm(server.url, 40, seed=5))
    assert set(outcomes) <= {"answered", "left", "408"}
    assert outcomes.count("answered") > 10
    until(lambda: is_empty(server))
    assert server.llm.stats().kv_reserved <= LIMIT
    assert not server.server._service.admission.under_way


async def storm(url: str, count: int, seed: int) -> list[str]:
    """Whole and streamed requests of several methods, with clients that leave and deadlines that come."""
    chance = random.Random(seed)

    async def one(client: httpx.AsyncClient, number: int) -> str:
        kept: dict[str, Any] = {"method": chance.choice(["full", "h2o", "tova"])}
        if kept["method"] != "full":
            kept["budget"] = chance.choice([8, 16])
        if number % 5 == 0:
            kept["deadline_s"] = 0.02 * chance.randint(1, 20)
        body = {
            "prompt": [1, *(chance.randint(2, 95) for _ in range(chance.randint(1, 60)))],
            "seed": number,
            "max_tokens": chance.randint(1, 20),
            "stream": number % 2 == 0,
            "millpond": kept,
            "n": 1 + number % 2,
        }
        patience = 0.02 * chance.randint(1, 20) if number % 3 == 0 else 60
        try:
            answer = await client.post("/v1/completions", json=body, timeout=patience)
        except httpx.TimeoutException:
            return "left"
        return "answered" if answer.status_code == 200 else str(answer.status_code)

    async with httpx.AsyncClient(base_url=url, limits=httpx.Limits(max_connections=64)) as client:
        return await asyncio.gather(*(one(client, number) for number in range(count)))
