"""MiKV under a budget in bytes: both tiers stay inside it, and every token stays, in the library and in the engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import millpond as mp
from millpond.engine.engine import Engine
from millpond.engine.request import Request
from millpond.errors import BudgetError
from tests.helpers.engine.helpers import finish, greedy
from tests.helpers.engine.helpers import tokens as answer_of
from tests.matrix.test_codecs import llama

METHODS: dict[str, dict[str, Any]] = {"h2o": {"sinks": 2}, "snapkv": {"window": 8}, "ada": {"score": "h2o", "every": 0}}
IDS = torch.randint(2, 96, (1, 300), generator=torch.Generator().manual_seed(3))


def whole(layer_cache: Any) -> bool:
    """Whether every head holds every token once."""
    rows = layer_cache.read(0).positions
    return all(sorted(p for p in row.tolist() if p >= 0) == list(range(layer_cache.columns)) for row in rows)


@pytest.mark.parametrize(
    ("method", "codec"),
    [("h2o", "mikv"), ("snapkv", "mikv4"), ("h2o", "int8_mikv"), pytest.param("ada", "mikv", marks=pytest.mark.slow)],
)
def test_both_tiers_stay_inside_the_bytes(method: str, codec: str) -> None:
    """The upper tier shrinks as the text grows, and nothing leaves."""
    amount, upper, most = {"mikv": 220_000, "mikv4": 300_000, "int8_mikv": 230_000}[codec], [], 0
    with torch.no_grad(), mp.compress(llama(), method, f"{amount}B", codec, **METHODS[method]) as cache:
        llama()(IDS, cache=cache)
        for n in range(130):
            llama()(torch.tensor([[2 + n % 90]]), cache=cache)
            stats = cache.stats()
            most = max(most, stats.kv_bytes + stats.metadata_bytes)
            assert most <= amount, n
            upper.append(int(cache.layer_caches[0].table.budgeted().mean()))
        assert all(whole(layer_cache) for layer_cache in cache.layer_caches)
        cache.check_integrity()
    assert most > 0.75 * amount
    assert upper[-1] < upper[0] - 8


def test_a_text_that_fits_stays_plain() -> None:
    with torch.no_grad(), mp.compress(llama(), "h2o", "1MiB", "mikv") as cache:
        llama()(IDS, cache=cache)
        llama()(IDS[:, :1], cache=cache)
        assert not cache.layer_caches[0].table.quantized.lens.any()


@pytest.mark.parametrize("new", [8, 400])
def test_bytes_that_the_lower_tier_takes_are_refused_alike(new: int) -> None:
    """The library says so when the text has grown so far, the engine before it reads the prompt."""
    text = r"mikv.*stores all of \d+ tokens, and their lower tier leaves room for.*raise the budget"
    amount = "40kB" if new == 8 else "160kB"
    options = {"max_new_tokens": new, "do_sample": False, "attention_mask": torch.ones_like(IDS)}
    with mp.compress(llama(), "h2o", amount, "mikv") as cache, pytest.raises(BudgetError, match=text):
        llama().generate(IDS, cache=cache, **options)
    engine = Engine(llama(), method="h2o", budget=amount, codec="mikv")
    with pytest.raises(BudgetError, match=text):
        engine.add(Request(request_id="a", prompt=tuple(IDS[0].tolist()), params=greedy(new)))
    engine.close()


@pytest.mark.parametrize("method", ["h2o"])
def test_the_engine_answers_as_generate(method: str) -> None:
    amount = "220kB"
    with mp.compress(llama(), method, amount, "mikv", **METHODS[method]) as cache:
        out = llama().generate(
            IDS, cache=cache, max_new_tokens=60, do_sample=False, attention_mask=torch.ones_like(IDS)
        )
    engine = Engine(llama(), method=method, options=METHODS[method], budget=amount, codec="mikv", max_step_tokens=64)
    for name, n in (("long", 300), ("short", 120)):
        engine.add(Request(request_id=name, prompt=tuple(IDS[0, :n].tolist()), params=greedy(60)))
    done = finish(engine)
    assert answer_of(done["long"]) == out[0, 300:].tolist()
    engine.close()
