"""Caches in few bits inside the engine: tokens of generate(), pages that come back, and the bytes that they take."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import millpond as mp
from millpond.engine.engine import Engine
from millpond.engine.request import CacheOptions, Request
from millpond.errors import OptionError
from millpond.kernels import native
from millpond.models.lean.decoder import Decoder
from tests.helpers.engine.helpers import finish, greedy, tokens

LENGTHS = (210, 150, 90)
NEW = 32
#: A method, its options, a budget and a format.
CASES: dict[str, tuple[str, dict[str, Any], str | None, str]] = {
    "full int8": ("full", {}, None, "int8"),
    "full int4": ("full", {}, None, "int4"),
    "full kivi2": ("full", {}, None, "kivi2"),
    "h2o int4": ("h2o", {}, "70%", "int4"),
    "snapkv think": ("snapkv", {"window": 8}, "70%", "think"),
    "full think": ("full", {}, None, "think:0.5:0.25"),
    "ada pair": ("ada", {"score": "snapkv/window=8"}, "70%", "int8+int4"),
    "h2o mikv": ("h2o", {}, "30%", "mikv"),
    "full rotated4": ("full", {}, None, "rotated4"),
    "streaming int4": ("streaming", {"positions": "absolute"}, "70%", "int4"),
    "full by layer": ("full", {}, None, "0=bf16,1=int4"),
    "h2o by layer": ("h2o", {}, "70%", "0=kivi4,*=int8+int4"),
    "h2o mikv above": ("h2o", {}, "30%", "0=auto,*=mikv"),
    "full by age": ("full", {}, None, "bf16:20,kivi4:50,kivi2"),
    "h2o int8 mikv": ("h2o", {}, "30%", "int8_mikv"),
    "h2o by age": ("h2o", {}, "80%", "bf16:10%,kivi4:20%,kivi2"),
}


@cache
def model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=512,
        attn_implementation="sdpa",
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def prompt(length: int) -> list[int]:
    return [int(i) for i in torch.randint(2, 96, (length,), generator=torch.Generator().manual_seed(length))]


@cache
def alone(case: str, length: int) -> list[int]:
    method, options, budget, codec = CASES[case]
    with mp.compress(model(), method, budget, codec, **options) as kept:
        out = model().generate(
            torch.tensor([prompt(length)]),
            cache=kept,
            max_new_tokens=NEW,
            do_sample=False,
            attention_mask=torch.ones(1, length, dtype=torch.long),
        )
    return [int(i) for i in out[0, length:]]


def engine_for(case: str, **more: Any) -> Engine:
    method, options, budget, codec = CASES[case]
    return Engine(model(), method=method, options=options, budget=budget, codec=codec, max_step_tokens=64, **more)


def ask(length: int, **more: Any) -> Request:
    return Request(request_id=str(length), prompt=tuple(prompt(length)), params=greedy(NEW, **more))


@pytest.mark.parametrize("case", CASES)
def test_batched_and_in_chunks_as_alone(case: str) -> None:
    engine = engine_for(case)
    for n in LENGTHS:
        engine.add(ask(n))
    done = finish(engine)
    engine.close()
    assert {n: tokens(done[str(n)]) for n in LENGTHS} == {n: alone(case, n) for n in LENGTHS}


@pytest.mark.skipif(not native.is_available(), reason="installed without native kernels")
@pytest.mark.in_turns(0, of=2)
@pytest.mark.parametrize("case", CASES)
def test_codes_are_met_in_one_call(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step runs all layers in one native call, but for entries that are rotated or in several tiers by age."""
    calls: list[int] = []
    real = Decoder.step

    def step(self: Decoder, ids: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        calls.append(len(ids))
        return real(self, ids, *rest)

    monkeypatch.setattr(Decoder, "step", step)
    found = []
    for _ in range(2):
        engine = engine_for(case)
        for n in LENGTHS:
            engine.add(ask(n))
        found.append({name: tokens(output) for name, output in finish(engine).items()})
        engine.close()
        monkeypatch.setattr(Decoder, "in_one_call", lambda self, n: None)
    assert found[0] == found[1]
    assert bool(calls) == (case not in ("full rotated4", "full by age", "h2o by age", "h2o int8 mikv"))


@pytest.mark.parametrize(
    "case",
    [
        "full int4",
        "h2o int4",
        "h2o mikv",
        "h2o int8 mikv",
        "snapkv think",
        "full rotated4",
        "full by layer",
        "h2o by layer",
        "h2o by age",
    ],
)
def test_carried_out_and_back_as_alone(case: str) -> None:
    engine = engine_for(case, kv_memory="800kB", overcommit=8)
    for n in LENGTHS:
        engine.add(ask(n))
    done = finish(engine)
    assert {n: tokens(done[str(n)]) for n in LENGTHS} == {n: alone(case, n) for n in LENGTHS}
    assert engine.stats().preemptions or case != "full int4"
    engine.close()


def test_codes_wait_in_files_as_alone(tmp_path: Path) -> None:
    engine = engine_for("full int4", kv_memory="800kB", overcommit=8, swap_to=tmp_path)
    for n in LENGTHS:
        engine.add(ask(n))
    done = finish(engine)
    assert {n: tokens(done[str(n)]) for n in LENGTHS} == {n: alone("full int4", n) for n in LENGTHS}
    assert engine.stats().preemptions
    engine.close()


def test_several_answers_of_one_prompt() -> None:
    engine = engine_for("full int4")
    engine.add(ask(210, n=3))
    done = finish(engine)
    engine.close()
    assert [tokens(done["210"], index) for index in range(3)] == [alone("full int4", 210)] * 3


def test_formats_beside_each_other() -> None:
    engine = engine_for("full int8", kv_memory="8MB")
    cases = [case for case in CASES if case.startswith("full")]
    for case in cases:
        request = ask(150)
        engine.add(
            Request(
                request_id=case, prompt=request.prompt, params=request.params, cache=CacheOptions(codec=CASES[case][3])
            )
        )
    done = finish(engine)
    engine.close()
    assert {case: tokens(done[case]) for case in cases} == {case: alone(case, 150) for case in cases}


def test_figures_are_those_of_the_pages() -> None:
    held = {}
    for codec in ("bf16", "int8", "int4"):
        engine = Engine(model(), method="full", codec=codec)
        engine.add(ask(210))
        held[codec] = finish(engine)["210"].completions[0].kv
        engine.close()
    sizes = [held[codec].kv_bytes for codec in ("int4", "int8", "bf16") if held[codec] is not None]
    assert sizes == sorted(sizes)
    assert sizes[0] < 0.7 * sizes[2]  # the newest entries stay as they are
    assert all(figures is not None and figures.evicted == 0 for figures in held.values())


def test_what_cannot_be_put_together_is_refused() -> None:
    with pytest.raises(OptionError, match="turned"):
        Engine(model(), method="streaming", options={"positions": "cache_relative"}, codec="int4")
    engine = Engine(model(), method="full")
    with pytest.raises(OptionError, match="unknown codec"):
        engine.add(Request(request_id="a", prompt=(5, 6), cache=CacheOptions(codec="int5")))
    engine.close()


def test_lower_tiers_go_on_taking_what_leaves() -> None:
    method, options, budget, codec = CASES["h2o mikv"]
    ids, new = torch.tensor([prompt(210)]), 120
    with mp.compress(model(), method, budget, codec, **options) as kept:
        model().generate(ids, cache=kept, max_new_tokens=new, do_sample=False, attention_mask=torch.ones_like(ids))
        expected = kept.stats().kv_bytes
    engine = engine_for("h2o mikv")
    engine.add(Request(request_id="one", prompt=tuple(prompt(210)), params=greedy(new)))
    held = 0
    while engine.busy:
        engine.step()
        held = max(held, engine.stats().kv_bytes if engine.stats().generated_tokens == new - 1 else 0)
    engine.close()
    assert held == pytest.approx(expected, rel=0.1)


def test_tiers_of_codes_promise_no_equal_bits() -> None:
    engine = Engine(model(), method="h2o", budget="30%", codec="mikv", deterministic=True)
    engine.close()
    with pytest.raises(OptionError, match=r"int8_mikv4.*deterministic=True promises equal ones; use 'mikv4'"):
        Engine(model(), method="h2o", budget="30%", codec="int8_mikv4", deterministic=True)
