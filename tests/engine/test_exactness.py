"""Whatever runs beside a request, and however its prompt is cut: its tokens are those of generate() alone."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import millpond as mp
from millpond.engine.engine import Engine
from millpond.engine.request import CacheOptions, Request
from millpond.engine.sampling.params import SamplingParams
from tests.helpers.engine.helpers import (
    KEEP_ALL,
    LENGTHS,
    METHODS,
    add,
    alone,
    ask,
    budget_of,
    engine_for,
    finish,
    greedy,
    prompt,
    tokens,
)
from tests.helpers.hf.families import generate, shared_model

FAMILIES = ["mistral", "qwen3", "opt", "gpt_neox", "gemma2", "gpt_oss", "gpt2", "phi3", "mixtral"]


@pytest.mark.parametrize("method", sorted(METHODS))
def test_batched_and_in_chunks_as_alone(method: str) -> None:
    engine = engine_for(method)
    add(engine, *map(ask, LENGTHS))
    done = finish(engine)
    engine.close()
    assert {n: tokens(done[str(n)]) for n in LENGTHS} == {n: alone(method, n) for n in LENGTHS}


@pytest.mark.in_turns(0, of=2)
@pytest.mark.parametrize("method", sorted(METHODS))
def test_carried_out_and_back_as_alone(method: str) -> None:
    engine = engine_for(method, kv_memory="36kB", overcommit=4)
    add(engine, ask(57), ask(40), ask(31))
    done = finish(engine)
    engine.close()
    assert {n: tokens(done[str(n)]) for n in (57, 40, 31)} == {n: alone(method, n) for n in (57, 40, 31)}
    assert engine.stats().preemptions or method not in KEEP_ALL


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family: str) -> None:
    engine = engine_for("h2o", family)
    add(engine, ask(40), ask(31))
    done = finish(engine)
    engine.close()
    assert {n: tokens(done[str(n)]) for n in (40, 31)} == {n: alone("h2o", n, family=family) for n in (40, 31)}


@pytest.mark.covering
@pytest.mark.parametrize("step_tokens", [1, 2, 7, 500])
@pytest.mark.parametrize("method", ["snapkv", "tova", "streaming"])
def test_the_size_of_chunks_changes_nothing(method: str, step_tokens: int) -> None:
    engine = engine_for(method, max_step_tokens=step_tokens)
    add(engine, ask(40, greedy(6)), ask(31, greedy(6)))
    done = finish(engine)
    engine.close()
    assert tokens(done["40"]) == alone(method, 40)[:6]
    assert tokens(done["31"]) == alone(method, 31)[:6]


def test_equal_norms_are_told_apart_by_position_whatever_the_chunks() -> None:
    """In a first layer each occurrence of a token has a key of the same length, but for the rounding of its product."""
    draw = random.Random(1)
    for _ in range(4):
        words = draw.sample(range(3, 60), 4)
        ids = tuple(draw.choice(words) for _ in range(70))
        answers = set()
        for step_tokens in (1, 7, 500):
            engine = engine_for("knorm", max_step_tokens=step_tokens)
            add(engine, Request(request_id="it", prompt=ids, params=greedy(12)))
            answers.add(tuple(tokens(finish(engine)["it"])))
            engine.close()
        assert len(answers) == 1


def test_the_order_of_arrival_changes_nothing() -> None:
    for order in (LENGTHS, LENGTHS[::-1]):
        engine = engine_for("h2o")
        add(engine, *map(ask, order[:2]))
        for n in order[2:]:  # these come while the others run
            engine.step()
            add(engine, ask(n))
        done = finish(engine)
        engine.close()
        assert {n: tokens(done[str(n)]) for n in order} == {n: alone("h2o", n) for n in order}


def test_methods_beside_each_other() -> None:
    methods = ["h2o", "full", "snapkv", "streaming", "pyramidkv", "d2o", "ems"]
    engine = engine_for("h2o", kv_memory="1MB")
    add(engine, *(ask(40, name=m, cache=CacheOptions(method=m, budget=budget_of(m))) for m in methods))
    done = finish(engine)
    engine.close()
    assert {m: tokens(done[m]) for m in methods} == {m: alone(m, 40) for m in methods}


def test_several_answers_share_their_prompt() -> None:
    for method in ("full", "h2o", "snapkv", "streaming"):
        engine = engine_for(method, kv_memory="200kB")
        add(engine, ask(57, greedy(n=3)), ask(40))
        done = finish(engine)
        engine.close()
        assert [tokens(done["57"], index) for index in range(3)] == [alone(method, 57)] * 3
        assert tokens(done["40"]) == alone(method, 40)


def test_several_answers_take_less_than_as_many_prompts() -> None:
    engine = engine_for("full", page_slots=4)
    add(engine, ask(80, greedy(4, n=4)))
    while not any(output.completions[0].token_ids for output in engine.step()):
        pass
    engine.step()
    once = engine_for("full", page_slots=4)
    add(once, ask(80, greedy(4)))
    while not any(output.completions[0].token_ids for output in once.step()):
        pass
    once.step()
    assert engine.stats().kv_bytes < 1.5 * once.stats().kv_bytes
    engine.close()
    once.close()


def test_answers_of_one_prompt_differ_where_they_are_drawn() -> None:
    engine = engine_for("h2o")
    add(engine, ask(40, SamplingParams(max_tokens=12, temperature=1.5, n=4, seed=3)))
    done = finish(engine)
    engine.close()
    assert len({tuple(tokens(done["40"], index)) for index in range(4)}) > 1


@pytest.mark.parametrize("method", ["snapkv", "ada", "duo_attention", "h2o"])
def test_bytes_of_one_sequence_bound_what_is_decoded_too(method: str) -> None:
    """Each request stays inside its own bytes, whatever runs beside it, and answers as it does alone."""
    chosen: dict[str, Any] = {"duo_attention": {"recent": 4}, "snapkv": {"window": 4}, "h2o": {"decode": "grow"}}
    options, amount, new = chosen.get(method, {"score": "snapkv/window=4"}), 20_000, 60
    model = shared_model("llama")
    engine = Engine(model, method=method, options=options, budget=f"{amount}B", page_slots=4, max_step_tokens=16)
    add(engine, *(ask(n, greedy(new)) for n in (57, 31)))
    done = finish(engine)
    engine.close()
    for n in (57, 31):
        ids = torch.tensor([prompt(n)])
        with mp.compress(model, method, f"{amount}B", page_slots=4, **options) as kept:
            out = generate(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, new, cache=kept)
            stats = kept.stats()
        assert stats.evicted > 0
        assert stats.kv_bytes <= amount
        assert tokens(done[str(n)]) == out[0, n:].tolist()
        answered = done[str(n)].completions[0].kv
        assert answered is not None
        assert 0 < answered.kv_bytes <= amount
