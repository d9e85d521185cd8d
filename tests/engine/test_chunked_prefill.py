"""Eviction while prompts are read in the engine, and scores that are shared with the pages of a prompt."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import millpond as mp
from millpond.engine.engine import Engine
from millpond.engine.memory_estimate import estimate
from millpond.engine.request import CacheOptions, Request
from millpond.errors import OptionError
from millpond_lab.bench.generate.candidates import ModelShape
from tests.helpers.engine.helpers import add, finish, greedy, prompt, tokens
from tests.helpers.hf.families import generate, shared_model

LENGTHS = (150, 97, 40, 3)
CHUNKS: dict[str, Any] = {"prefill": "chunks", "chunk": 16}
METHODS = ["locret", "keydiff", "knorm", "qfilters"]
NEW = 6
#: A model that reads long prompts in little time.
LONG = ModelShape(layers=1, width=32, heads=2, kv_heads=1, head_dim=16, ffn=32, vocab=64)
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def alone(method: str, length: int, options: dict[str, Any], budget: Any = 24) -> list[int]:
    model, ids = shared_model("llama"), torch.tensor([prompt(length)])
    with mp.compress(model, method, budget, **options) as kept:
        out = generate(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, NEW, cache=kept)
    return [int(i) for i in out[0, length:]]


def engine(method: str, options: dict[str, Any], budget: Any = 24, **more: Any) -> Engine:
    settings = {"max_step_tokens": 21, "page_slots": 4} | more
    return Engine(shared_model("llama"), method=method, options=options, budget=budget, **settings)


def ask(length: int) -> Request:
    return Request(request_id=str(length), prompt=prompt(length), params=greedy(NEW, ignore_eos=True))


@pytest.mark.covering
@pytest.mark.parametrize("runner", ["lean", "modules"])
@pytest.mark.parametrize("decode", ["grow", "evict"])
@pytest.mark.parametrize("prefill", [{}, CHUNKS])
@pytest.mark.parametrize("method", METHODS)
def test_the_tokens_are_those_of_generate(method: str, prefill: dict[str, Any], decode: str, runner: str) -> None:
    """Prompts beside each other, cut wherever the scheduler cuts them."""
    options = {**prefill, "decode": decode}
    made = engine(method, options, runner=runner)
    for length in LENGTHS:
        add(made, ask(length))
    done = finish(made)
    made.check_integrity()
    for length in LENGTHS:
        assert tokens(done[str(length)]) == alone(method, length, options), length
    made.close()


@pytest.mark.parametrize("method", METHODS)
def test_no_layer_ever_holds_more_than_budget_and_chunk(method: str) -> None:
    made = engine(method, CHUNKS)
    add(made, ask(150))
    most = 0
    while made.busy:
        made.step()
        for state in made._requests:
            for layer_cache in state.private_cache.layers if state.private_cache is not None else []:
                most = max(most, int(layer_cache.stored.max(initial=0)))
        made.check_integrity()
    assert 24 < most <= 24 + 16
    made.close()


def test_a_prompt_runs_where_the_memory_holds_budget_and_chunk() -> None:
    """What a prompt of 150 needs in full is refused; with eviction in chunks it fits, and the limit is never passed."""
    whole, chunked = (engine("locret", options) for options in ({}, CHUNKS))
    needs = [
        estimate(
            e._parts.decode_groups.group(e._parts.decode_groups.complete(CacheOptions())).cache_factory, 150, NEW, 1
        )
        for e in (whole, chunked)
    ]
    assert needs[1].prefill < needs[0].prefill / 3
    whole.close()
    chunked.close()
    limit = needs[1].peak(1)
    refused = engine("locret", {}, kv_memory=limit)
    with pytest.raises(OptionError, match=r"(?i)memory"):
        refused.add(ask(150))
    refused.close()
    made = engine("locret", CHUNKS, kv_memory=limit)
    for length in LENGTHS:
        add(made, ask(length))
    done = {}
    while made.busy:
        done |= {output.request_id: output for output in made.step() if output.finished}
        assert made._parts.memory.nbytes <= limit
        made.check_integrity()
    assert made.stats().preemptions == 0
    for length in LENGTHS:
        assert tokens(done[str(length)]) == alone("locret", length, CHUNKS)
    made.close()


@pytest.mark.slow
def test_four_times_the_requests_are_in_flight_in_the_memory_of_one_prompt() -> None:
    """With memory for one full prompt of 4,096 tokens and its answer of 1,024: one request, or all with chunks of 256.

    With prefill="once" the second prompt is not read before the first answer is there.
    """
    model, length, new, count = LONG.build().float(), 4096, 1024, 6

    def made_for(prefill: str, **more: Any) -> Engine:
        options = {"prefill": prefill, "chunk": 256, "decode": "evict"}
        return Engine(model, method="locret", options=options, budget=205, max_step_tokens=512, max_running=64, **more)

    one = made_for("once")
    cache_factory = one._parts.decode_groups.group(one._parts.decode_groups.complete(CacheOptions())).cache_factory
    limit = estimate(cache_factory, length, new, 1).peak(1)
    one.close()
    most = {}
    for prefill in ("once", "chunks"):
        made, running, done = made_for(prefill, kv_memory=limit), 0, 0
        for seed in range(count):
            ids = torch.randint(LONG.vocab, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
            made.add(Request(request_id=str(seed), prompt=ids, params=greedy(new, ignore_eos=True)))
        while made.busy and not (prefill == "once" and done):
            done += sum(output.finished for output in made.step())
            running = max(running, made.stats().running)
            assert made._parts.memory.nbytes <= limit
        most[prefill] = running, done, made.stats().preemptions
        made.close()
    assert most == {"once": (1, 1, 0), "chunks": (count, count, 0)}


def scores(made: Engine, name: str) -> list[torch.Tensor]:
    state = made._requests[name]
    assert state.private_cache is not None
    return [layer_cache.read(0).scores for layer_cache in state.private_cache.layers]


def test_scores_are_shared_with_the_pages_of_a_prompt() -> None:
    """Whoever read a page wrote its scores; the answers are those without sharing."""
    common = prompt(96)
    texts = {"a": common + prompt(20), "b": common + prompt(31)}
    made = engine("locret", {}, prefix_cache=True, max_step_tokens=12)
    read: dict[str, list[torch.Tensor]] = {}
    done = {}
    for name, ids in texts.items():
        add(made, Request(request_id=name, prompt=ids, params=greedy(NEW, ignore_eos=True)))
        while made.busy:
            done |= {output.request_id: output for output in made.step() if output.finished}
            if name in made._requests and made._requests[name].private_cache is not None:
                read[name] = scores(made, name)
            made.check_integrity()
    kv = done["b"].completions[0].kv
    assert 90 <= kv.shared_tokens <= 96
    for a, b in zip(read["a"], read["b"], strict=True):
        assert torch.equal(a[:, :88], b[:, :88])
        assert (a[:, :88] != 0).all()
    for name, ids in texts.items():
        with mp.compress(shared_model("llama"), "locret", 24) as kept:
            own = torch.tensor([ids])
            inputs = {"input_ids": own, "attention_mask": torch.ones_like(own)}
            out = generate(shared_model("llama"), inputs, NEW, cache=kept)
        assert tokens(done[name]) == [int(i) for i in out[0, len(ids) :]]
    made.close()


@pytest.mark.parametrize(("first", "second"), [("keydiff", "locret"), ("locret", "keydiff")])
def test_pages_without_scores_are_not_taken_for_those_with(first: str, second: str) -> None:
    made = Engine(shared_model("llama"), method=first, budget=24, prefix_cache=True, page_slots=4)
    done = {}
    for name in (first, second):
        asked = CacheOptions(method=name, budget=24)
        add(made, Request(request_id=name, prompt=prompt(97), params=greedy(NEW, ignore_eos=True), cache=asked))
        while made.busy:
            done |= {output.request_id: output for output in made.step() if output.finished}
    assert tokens(done[second]) == alone(second, 97, {})
    assert done[second].completions[0].kv.shared_tokens == 0
    made.close()


def test_prompts_that_were_evicted_from_do_not_enter_the_tree() -> None:
    made = engine("locret", CHUNKS, prefix_cache=True)
    for _ in range(2):
        add(made, ask(97))
        done = finish(made)
        assert tokens(done["97"]) == alone("locret", 97, CHUNKS)
    assert made.stats().shared_tokens == 0
    made.close()


def test_answers_that_nothing_plans_run_in_one_call() -> None:
    """Of the lean runner: what is decoded needs no score where nothing behind the prompt reads it."""
    for decode, fused in (("grow", True), ("evict", False)):
        made = engine("locret", {"decode": decode})
        add(made, ask(40))
        while not made._requests["40"].completions[0].tokens:
            made.step()
        made.step()
        (group,) = made._parts.decode_groups.groups
        assert all(
            layer_cache.is_fusable(1, layer_cache.attention.shape) == fused for layer_cache in group.batch_cache.layers
        )
        made.close()
