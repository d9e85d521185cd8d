"""A layer that merges: going back, copies, sliding windows, bytes with entries that gather, latents."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor

import millpond as mp
from millpond.cache.layer.layer_cache import LayerCache
from millpond.errors import UnsupportedModelError
from millpond.kernels.args import AttentionShape
from millpond.methods import METHODS
from tests.helpers.hf.families import left_padded, one, shared_model
from tests.helpers.matrix.models import llama, prompts
from tests.helpers.papers.fixture import make_layer_cache
from tests.helpers.papers.keyed import text

METHODS_: dict[str, dict[str, Any]] = {
    "merge_on_evict": {"score": "h2o/sinks=1", "mass_bias": True, "every": 3},
    "kvmerger": {"decode": "merge", "mass_bias": True},
    "cam": {"sinks": 1, "targets": 3, "draw": True},
    "ems": {"window": 4, "threshold": 0.0, "mass_bias": True, "every": 2},
}


def started(method: str, n: int = 20) -> tuple[LayerCache, tuple[Tensor, Tensor, Tensor]]:
    qkv = text(heads=2, n=40)
    cache = make_layer_cache(METHODS.get(method)(**METHODS_[method]), 10, slots=4)
    go(cache, qkv, 0, n)
    return cache, qkv


def go(cache: LayerCache, qkv: tuple[Tensor, Tensor, Tensor], first: int, last: int) -> Tensor:
    q, k, v = (t[None, :, first:last] for t in qkv)
    return cache.attend(q, k, v, None, AttentionShape(1.0))


def steps(cache: LayerCache, qkv: tuple[Tensor, Tensor, Tensor], first: int, last: int) -> Tensor:
    return torch.cat([go(cache, qkv, t, t + 1) for t in range(first, last)], 2)


@pytest.mark.parametrize("method", METHODS_)
def test_going_back_leaves_no_trace_of_a_merge(method: str) -> None:
    cache, qkv = started(method)
    steps(cache, qkv, 20, 23)
    state, before, columns, seen = cache.fork(), cache.read(0), cache.columns, cache.tracker.seen.copy()
    first = steps(cache, qkv, 23, 33)
    assert state.table is not None
    shared = LayerCache.read(_holding(cache, state.table), 0)
    for a, b in zip(shared, before, strict=True):
        assert (a is None) is (b is None)
        if a is not None and b is not None:
            assert torch.equal(a, b)  # no shared page was written
    cache.restore(state)
    cache.tracker.rewind(columns, seen)
    again = steps(cache, qkv, 23, 33)
    assert torch.equal(first, again)
    assert cache.table is not None
    cache.table.pool.check_integrity([cache.table.held()])


def _holding(cache: LayerCache, table: Any) -> LayerCache:
    """A view of the entries of another table."""
    other = LayerCache.__new__(LayerCache)
    other.__dict__.update(cache.__dict__)
    other._table = table
    return other


@pytest.mark.covering
@pytest.mark.parametrize("method", METHODS_)
@pytest.mark.parametrize("family", ["mistral", "gemma2", "gemma3"])
def test_sliding_windows(method: str, family: str) -> None:
    """A padded batch goes as its rows alone; no layer holds more than the budget and what gathers."""
    model, prompt = deepcopy(shared_model(family)).double(), left_padded([14, 30])
    options = METHODS_[method]
    kept = []
    for rows in ([0, 1], [0], [1]):
        inputs = {name: t[rows] for name, t in prompt.items()}
        if len(rows) == 1:
            real = inputs["attention_mask"][0].bool()
            inputs = {name: t[:, real] for name, t in inputs.items()}
        with torch.no_grad(), mp.compress(model, method, 8, page_slots=4, **options) as cache:
            model.generate(**inputs, cache=cache, max_new_tokens=14, do_sample=False)
            assert max(max(h) for layer in cache.stats().stored for h in layer) < 8 + options.get("every", 1)
            kept.append([[cache.positions(layer, s) for layer in range(len(cache.layers))] for s in range(len(rows))])
            cache.check_integrity()
    assert kept[0] == [*kept[1], *kept[2]]


@pytest.mark.parametrize("method", METHODS_)
def test_bytes_held_stay_below_the_budget(method: str) -> None:
    """Masses, and entries that gather before they are merged, included."""
    model, (ids, mask) = llama(dtype=torch.float32), prompts(2, length=100)
    options = METHODS_[method]
    with torch.no_grad(), mp.compress(model, method, "40000B", page_slots=4, **options) as cache:
        model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=30, do_sample=False, cache=cache)
        stats = cache.stats()
        assert 40_000 - 2 * 8 * cache.pools[0].page_bytes <= stats.kv_bytes + stats.metadata_bytes <= 40_000
        assert stats.evicted > 0


@pytest.mark.parametrize("method", METHODS_)
def test_beams(method: str) -> None:
    """A batch of repeated sequences goes as each alone, though they share pages first."""
    model, prompt = llama("gqa"), one(30)
    with torch.no_grad(), mp.compress(model, method, 10, page_slots=4, **METHODS_[method]) as cache:
        model(prompt["input_ids"], cache=cache)
        cache.batch_repeat_interleave(2)
        later = torch.tensor([[3, 4, 5, 6, 7, 8], [9, 8, 7, 6, 5, 4]])
        together = torch.cat([model(later[:, t : t + 1], cache=cache).logits for t in range(6)], 1)
        cache.check_integrity()
        for row in (0, 1):
            cache.reset()
            model(prompt["input_ids"], cache=cache)
            own = later[row : row + 1]
            alone = torch.cat([model(own[:, t : t + 1], cache=cache).logits for t in range(6)], 1)
            assert torch.allclose(alone[0], together[row], atol=1e-9)


def test_latents_are_not_merged() -> None:
    model = shared_model("deepseek_v3")
    with (
        torch.no_grad(),
        mp.compress(model, "merge_on_evict", 8, score="h2o") as cache,
        pytest.raises(UnsupportedModelError, match="stores latents"),
    ):
        model(**one(20), cache=cache)
