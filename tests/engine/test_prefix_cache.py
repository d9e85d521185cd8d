"""Prompts that begin alike: what they share, and that it changes no token."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

import millpond as mp
from millpond.engine.engine import Engine
from millpond.engine.request import MAX_SALT, CacheOptions, Request
from millpond.errors import OptionError
from tests.helpers.engine.helpers import METHODS, add, budget_of, engine_for, finish, greedy, prompt, tokens
from tests.helpers.hf.families import generate, shared_model

pytestmark = pytest.mark.filterwarnings("ignore::millpond.hf.layer_budgets.BudgetFloorWarning")

#: What the three texts begin with, and go on with.
COMMON = prompt(57)[:48]
TEXTS = {"a": COMMON + prompt(40), "b": COMMON + prompt(31), "c": COMMON[:30] + prompt(23), "d": COMMON + prompt(3)}

SHARE = ["full", "snapkv", "keydiff", "random", "tova", "pyramidkv", "ada", "lagkv"]
DO_NOT = ["h2o", "streaming", "fastgen", "infllm", "expected_attention", "minference"]


def request(name: str, method: str, **options: Any) -> Request:
    cache_options = CacheOptions(method=method, budget=budget_of(method), options=METHODS[method])
    return Request(request_id=f"{name}-{method}", prompt=TEXTS[name], params=greedy(8, **options), cache=cache_options)


@cache
def alone(name: str, method: str) -> list[int]:
    ids = torch.tensor([TEXTS[name]])
    with mp.compress(shared_model("llama"), method, budget_of(method), **METHODS[method]) as kept:
        out = generate(shared_model("llama"), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, 8, cache=kept)
    return [int(i) for i in out[0, ids.shape[1] :]]


def one_by_one(engine: Engine, *requests: Request) -> dict[str, Any]:
    done: dict[str, Any] = {}
    for asked in requests:
        add(engine, asked)
        while engine.busy:
            done |= {output.request_id: output for output in engine.step() if output.finished}
            engine.check_integrity()
    return done


def test_prompts_that_begin_together_read_what_they_share_once() -> None:
    """Both fit into the first step; the second one waits until the first has read the blocks that both begin with."""
    engine = engine_for("full", prefix_cache=True, max_step_tokens=512)
    for name in "ab":
        add(engine, request(name, "full"))
    done = {output.request_id: output for output in engine.drain()}
    shared = [done[f"{name}-full"].completions[0].kv.shared_tokens for name in "ab"]
    assert shared == [0, 48]
    assert engine.stats().prompt_tokens == len(TEXTS["a"]) + len(TEXTS["b"]) - 48
    for name in "ab":
        assert tokens(done[f"{name}-full"]) == alone(name, "full")
    engine.close()


@pytest.mark.parametrize("method", SHARE)
def test_shared_and_private_prompts_answer_alike(method: str) -> None:
    engine = engine_for(method, prefix_cache=True)
    done = one_by_one(engine, *(request(name, method) for name in "abcda"))
    for name in "abcd":
        assert tokens(done[f"{name}-{method}"]) == alone(name, method)
    kv = done[f"b-{method}"].completions[0].kv
    assert 40 <= kv.shared_tokens <= 48
    assert engine.stats().shared_tokens > 100
    assert engine.stats().kv_bytes > 0
    engine.close()
    assert engine.stats().kv_reserved == 0


@pytest.mark.parametrize("method", DO_NOT)
def test_methods_whose_plan_needs_the_prompts_queries_share_nothing(method: str) -> None:
    engine = engine_for(method, prefix_cache=True)
    done = one_by_one(engine, request("a", method), request("b", method))
    assert tokens(done[f"b-{method}"]) == alone("b", method)
    assert engine.stats().shared_tokens == 0
    engine.close()


def test_methods_share_with_each_other() -> None:
    engine = engine_for("full", prefix_cache=True)
    done = one_by_one(
        engine, request("a", "full"), request("b", "snapkv"), request("c", "keydiff"), request("a", "full")
    )
    assert tokens(done["b-snapkv"]) == alone("b", "snapkv")
    assert tokens(done["c-keydiff"]) == alone("c", "keydiff")
    assert tokens(done["a-full"]) == alone("a", "full")
    assert done["b-snapkv"].completions[0].kv.shared_tokens == 44  # its last 32 queries are its own
    engine.close()


def test_formats_do_not_share() -> None:
    engine = engine_for("full", prefix_cache=True)
    half = Request(
        request_id="half", prompt=TEXTS["b"], params=greedy(4), cache=CacheOptions(method="full", codec="bf16")
    )
    done = one_by_one(engine, request("a", "full"), half)
    assert done["half"].completions[0].kv.shared_tokens == 0
    engine.close()


def test_prompts_are_shared_by_requests_with_the_same_salt_alone() -> None:
    engine = engine_for("full", prefix_cache=True)

    def shared(salt: str | None) -> int:
        asked = replace(request("a", "full"), cache_salt=salt)
        (output,) = one_by_one(engine, asked).values()
        assert tokens(output) == alone("a", "full")
        return int(output.completions[0].kv.shared_tokens)

    salts = (None, "first salt", "second salt", "o" * MAX_SALT)
    assert [shared(salt) for salt in salts] == [0] * len(salts)
    assert [shared(salt) > 40 for salt in salts] == [True] * len(salts)
    assert "first salt" not in repr(vars(engine._parts.prefix_cache.tree)), (
        "the tree holds no salt, only what was made of it"
    )
    engine.close()


@pytest.mark.parametrize("salt", ["", "x" * (MAX_SALT + 1)])
def test_a_salt_out_of_bounds_is_refused(salt: str) -> None:
    engine = engine_for("full")
    with pytest.raises(OptionError, match=f"cache_salt has {len(salt)} characters: must have 1 to {MAX_SALT}"):
        engine.add(replace(request("a", "full"), cache_salt=salt))
    engine.close()


def test_kept_prompts_make_room_for_requests() -> None:
    engine = engine_for("full", prefix_cache=True, kv_memory="40kB")
    for round_ in range(3):
        for name in "abc":
            done = one_by_one(engine, request(name, "full"))
            assert tokens(done[f"{name}-full"]) == alone(name, "full"), round_
    assert engine.stats().kv_reserved <= 40_000
    assert engine.stats().preemptions == 0
    engine.close()


def test_many_at_once_with_too_little_room() -> None:
    engine = engine_for("full", prefix_cache=True, kv_memory="50kB", overcommit=3)
    asked = [request(name, method) for method in ("full", "snapkv", "random") for name in "abc"]
    add(engine, *asked)
    done: dict[str, Any] = {}
    while engine.busy:
        done |= {output.request_id: output for output in engine.step() if output.finished}
        engine.check_integrity()
        assert engine.stats().kv_reserved <= 50_000
    for one in asked:
        name, _, method = one.request_id.partition("-")
        assert tokens(done[one.request_id]) == alone(name, method)
    engine.close()


def test_log_probabilities_of_a_prompt_need_all_of_it() -> None:
    engine = engine_for("full", prefix_cache=True)
    done = one_by_one(engine, request("a", "full"), request("a", "full", prompt_logprobs=0))
    assert len(done["a-full"].prompt_logprobs) == len(TEXTS["a"])
    assert done["a-full"].completions[0].kv.shared_tokens == 0
    engine.close()


def test_nothing_is_kept_unless_asked_for() -> None:
    engine = engine_for("full")
    add(engine, request("a", "full"))
    finish(engine)  # which looks for pages that are left
    engine.close()
