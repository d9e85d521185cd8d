"""No number in a request harms another: each is refused with its range, or answered in bounded time and memory."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

import pytest

import millpond as mp
from millpond.engine.memory_estimate import estimate
from millpond.engine.request import CacheOptions
from millpond_lab.bench.common.machine import PeakMemory
from tests.helpers.server.live import Live, live
from tests.helpers.server.option_walk import PROMPT, Probe, by_choice, by_field, by_text, by_value, walk

#: Bytes that the caches may take, and what a server may take besides: activations, answers, and heaps of threads.
KV, BESIDE = 128 << 20, 96 << 20
WALKS = {"value": by_value, "choice": by_choice, "text": by_text, "field": by_field}
#: Probes of each walk in the quick suite; the sample is the same in every run.
SAMPLE = 15


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    def engine() -> mp.AsyncLLM:
        return mp.AsyncLLM("pond-recall", method="full", dtype="f32", kv_memory=KV, deterministic=True)

    with live(engine, api_keys=("mine", "theirs")) as running:
        yield running


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", WALKS)
def test_a_sample_of_all_numbers_harms_nobody(server: Live, kind: str) -> None:
    probes = list(WALKS[kind]())
    check(server, random.Random(f"{kind} 44").sample(probes, SAMPLE), {200})


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", WALKS)
def test_no_number_harms_anybody(server: Live, kind: str) -> None:
    check(server, list(WALKS[kind]()), {200, 400})


def check(server: Live, probes: list[Probe], statuses: set[int]) -> None:
    """Walk the probes; answers of all `statuses` are among them."""
    memory = PeakMemory()
    found = walk(server, probes)
    print(dict(found.statuses), found.slowest)
    assert not found.wrong, "\n".join(found.wrong[:20])
    assert (memory.growth() or 0) < KV + BESIDE
    assert all(found.statuses[status] > 0 for status in statuses)


@pytest.mark.parametrize(
    ("method", "options", "words"),
    [
        ("snapkv", {"kernel": 2**40 + 1}, "snapkv: kernel=1099511627777 must be odd, 1 to 255"),
        ("snapkv", {"kernel": -1}, "snapkv: kernel=-1 must be odd, 1 to 255"),
        ("h2o", {"recent": 2**70}, "h2o: recent=1180591620717411303424 must be 0 to 16,777,216 or 0 to 1"),
        ("infllm", {"sinks": 2**28}, "infllm: sinks=268435456 must be 0 to 16,777,216"),
        ("ada", {"score": "snapkv/kernel=-1"}, "snapkv: kernel=-1 must be odd, 1 to 255"),
        ("rkv", {"spared": 2**28}, "rkv: spared=268435456 must be 0 to 16"),
        ("streaming", {"sinks": 2**24}, "streaming: sinks=16777216 must be 0 to 1,024"),
        ("keydiff", {"prefill": "chunks", "chunk": 1}, "chunk=1 would read a prompt of 300 tokens in 300 parts"),
        ("infllm", {"together": 1, "block": 4}, "together=1 would read a prompt of 300 tokens in 300 parts"),
        ("h2o", {"sinks": "5"}, "h2o: sinks='5' is not a valid int, 0 to 16,777,216"),
    ],
)
def test_what_would_hurt_is_refused_within_a_second(
    server: Live, method: str, options: dict[str, Any], words: str
) -> None:
    began = time.process_time()
    with server.client() as client:
        body = {"prompt": PROMPT, "max_tokens": 2, "millpond": {"method": method, "budget": "50%", "options": options}}
        answer = client.post("/v1/completions", json=body, headers={"Authorization": "Bearer mine"})
        assert (answer.status_code, words in answer.json()["error"]["message"]) == (400, True), answer.text
        assert time.process_time() - began < 1
        assert client.get("/health").status_code == 200


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("infllm", {"sinks": 2**24}),
        ("infllm", {"block": 2**24}),
        ("streaming", {"sinks": 1024}),
        ("expected_attention", {"future": 4096}),
        ("snapkv", {"window": 1024, "kernel": 255}),
        ("rkv", {"spared": 16}),
    ],
)
def test_ends_of_ranges_cost_little(server: Live, method: str, options: dict[str, Any]) -> None:
    body = {"prompt": PROMPT, "max_tokens": 4, "millpond": {"method": method, "budget": "50%", "options": options}}
    memory, began = PeakMemory(), time.process_time()
    with server.client() as client:
        answer = client.post("/v1/completions", json=body, headers={"Authorization": "Bearer mine"})
    assert answer.status_code == 200, answer.text
    assert time.process_time() - began < 1
    assert (memory.growth() or 0) < 64 << 20


def test_numbers_of_hundreds_of_digits_are_refused(server: Live) -> None:
    huge = 10**400
    with server.client() as client:
        for kept in ({"max_kl": huge}, {"budget": huge}, {"options": {"sinks": huge}}, {"keep": [[0, huge]]}):
            body = {"prompt": PROMPT, "millpond": {"method": "h2o"} | kept}
            answer = client.post("/v1/completions", json=body, headers={"Authorization": "Bearer mine"})
            assert answer.status_code == 400, answer.text


def test_admission_counts_what_options_ask_for_beside_pages(server: Live) -> None:
    """Queries that a plan looks at, keys of sinks before RoPE, and keys by which blocks are looked up."""

    def need(method: str, **options: Any) -> int:
        engine = server.llm._engine
        group = engine._parts.decode_groups.group(CacheOptions(method=method, options=options, budget="50%"))
        return int(estimate(group.cache_factory, 2_000, 10, 1).prefill)

    engine = server.llm._engine
    a_query = sum(4 * layer.n_heads * layer.key_dim for layer in engine._model.layers)
    a_key = sum(4 * layer.n_kv_heads * layer.key_dim for layer in engine._model.layers)
    assert need("snapkv", window=1_000) - need("snapkv", window=10) == 990 * a_query
    assert need("streaming", sinks=1_000) - need("streaming", sinks=200) == 800 * 2 * a_key
    assert need("infllm", block=1, representatives=1) - need("infllm", block=10) == (2_010 - 201) * a_query
    assert need("snapkv", window=1_000) - need("expected_attention") == 1_000 * a_query


def test_protected_entries_that_do_not_fit_are_refused_before_anything_is_read(server: Live) -> None:
    """A plan that found it out would end the step, and with it the answer of whoever else is in it."""
    kept = {"method": "locret", "budget": "50%", "options": {"prefill": "chunks", "stabilizers": 1_000}}
    mine, theirs = ({"Authorization": f"Bearer {key}"} for key in ("mine", "theirs"))
    long = {"prompt": [9] * 40, "max_tokens": 300, "temperature": 0, "ignore_eos": True, "stream": True}
    with server.client() as client, client.stream("POST", "/v1/completions", json=long, headers=theirs) as stream:
        lines = stream.iter_lines()
        next(lines)
        with server.client() as other:
            body = {"prompt": PROMPT, "max_tokens": 2, "millpond": kept}
            answer = other.post("/v1/completions", json=body, headers=mine)
        assert (answer.status_code, answer.json()["error"]["code"]) == (422, "budget_impossible"), answer.text
        pieces = [line for line in lines if line.startswith("data: {")]
        assert '"finish_reason":"length"' in pieces[-1].replace(" ", ""), pieces[-1]
