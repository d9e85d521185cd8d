"""Requests that begin alike hold the codes of their beginning once, read them once in a step, and answer as alone."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from millpond.cache.attention.paged import PagedAttention
from millpond.cache.pages import shared_prefix
from millpond.engine.engine import Engine
from millpond.engine.outputs import RequestOutput
from millpond.engine.request import Request
from tests.helpers.engine.helpers import finish, greedy, tokens

#: Tokens that all prompts begin with, and more that each has.
COMMON, TAILS = 1024, (70, 90, 75, 130, 66, 101, 88, 71)
#: Formats whose pages depend on their entries alone: by channel or token, with a window, with sinks, rotated, of pairs.
CODECS = ["int4", "int8", "flexgen4", "kivi2", "fp8", "rotated4", "int8+int4", "0=bf16,1=int4"]


@cache
def model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=96,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=64,
        max_position_embeddings=2048,
        attn_implementation="sdpa",
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def prompts(common: int = COMMON, n: int = len(TAILS)) -> list[tuple[int, ...]]:
    draw = torch.Generator().manual_seed(common)
    begin = torch.randint(2, 96, (common,), generator=draw).tolist()
    return [(*begin, *torch.randint(2, 96, (tail,), generator=draw).tolist()) for tail in TAILS[:n]]


def answers(texts: list[tuple[int, ...]], codec: str, new: int = 8, **options: Any) -> tuple[list[list[int]], int]:
    """Tokens of each prompt, all sent at once, and the bytes of keys and values once all decode."""
    engine = Engine(model(), **{"method": "full", "codec": codec} | options)
    for number, text in enumerate(texts):
        engine.add(Request(request_id=str(number), prompt=text, params=greedy(new)))
    latest: dict[str, RequestOutput] = {}
    held = 0
    while engine.busy:
        latest |= {output.request_id: output for output in engine.step()}
        engine.check_integrity()
        if not held and len([output for output in latest.values() if output.completions[0].token_ids]) == len(texts):
            assert not any(output.finished for output in latest.values())
            held = engine.stats().kv_bytes
    assert engine.stats().kv_bytes == 0
    engine.close()
    return [tokens(latest[str(number)]) for number in range(len(texts))], held


def test_eight_requests_hold_one_beginning_and_eight_tails() -> None:
    texts = prompts()
    shared, held = answers(texts, "int4", new=24)
    alone, held_alone = answers(texts, "int4", new=24, prefix_cache=False)
    assert shared == alone
    _, tails = answers([text[COMMON:] for text in texts], "int4", new=24, prefix_cache=False)
    _, one = answers([texts[0][: COMMON + 64]], "int4", new=24)
    assert held <= tails + one
    assert held < held_alone / 2.5


@pytest.mark.parametrize("codec", CODECS)
def test_every_format_of_single_pages_shares(codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_prefix, "MIN_SHARED_CODES", 64)
    monkeypatch.setattr(shared_prefix, "MIN_SHARED_ENTRIES", 64)
    phases: list[int] = []
    real = PagedAttention._two_phases
    monkeypatch.setattr(PagedAttention, "_two_phases", lambda *args: phases.append(1) or real(*args))
    texts = prompts(320, 3)
    texts = [(*text, *text[:70]) for text in texts]  # behind a window of 128 as well
    shared, held = answers(texts, codec)
    n_phases = len(phases)
    alone, held_alone = answers(texts, codec, prefix_cache=False)
    assert shared == alone
    assert held < 0.92 * held_alone
    assert n_phases > 4
    assert len(phases) == n_phases, "nothing is shared, and nothing is read in two phases"


@pytest.mark.parametrize(
    ("codec", "options"),
    [
        ("think", {}),
        ("mikv", {"method": "h2o", "budget": "50%"}),
        ("bf16:20,kivi4:50,kivi2", {}),
        ("int4", {"method": "snapkv", "budget": "60%"}),
    ],
)
def test_codes_that_depend_on_more_than_their_page_are_not_shared(codec: str, options: dict[str, Any]) -> None:
    """Formats that look at the whole prompt, or move entries by age, and what a method has chosen."""
    texts = prompts(320, 3)
    shared, held = answers(texts, codec, **options)
    alone, held_alone = answers(texts, codec, prefix_cache=False, **options)
    assert shared == alone
    assert held == held_alone


def test_a_prompt_takes_over_no_more_codes_than_it_would_make() -> None:
    """The second prompt ends inside the pages of the first: its newest entries stay as they are."""
    (long,) = prompts(512, 1)
    codes = []
    for sharing in ("live", False):
        engine = Engine(model(), method="full", codec="int4", prefix_cache=sharing, max_step_tokens=2048)
        for text in (long, long[:300], long[:257]):
            engine.add(Request(request_id=str(len(text)), prompt=text, params=greedy(12)))
        while engine.stats().generated_tokens < 12:
            engine.step()
        stores = [
            cache.table.quantized for group in engine._parts.decode_groups.groups for cache in group.batch_cache.layers
        ]
        codes.append([sorted(store.lens.tolist()) for store in stores if store is not None])
        engine.close()
    assert codes[0] == codes[1]


def test_codes_are_shared_within_a_salt_alone() -> None:
    (text,) = prompts(320, 1)
    held = []
    for salts in (("a", "a"), ("a", "b")):
        engine = Engine(model(), method="full", codec="int4")
        for number, salt in enumerate(salts):
            engine.add(Request(request_id=str(number), prompt=text, params=greedy(30), cache_salt=salt))
        while engine.stats().generated_tokens < 20:
            engine.step()
        held.append(engine.stats().kv_bytes)
        engine.close()
    assert held[0] < 0.8 * held[1]


def test_one_answer_goes_on_when_the_other_that_made_its_codes_is_gone() -> None:
    text, other = prompts(320, 2)
    (alone,), _ = answers([other], "int4", new=90)
    engine = Engine(model(), method="full", codec="int4")
    engine.add(Request(request_id="first", prompt=text, params=greedy(4)))
    engine.add(Request(request_id="second", prompt=other, params=greedy(90)))
    done = finish(engine)
    assert tokens(done["second"]) == alone
    engine.close()
