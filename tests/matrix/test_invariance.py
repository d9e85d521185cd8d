"""What may never change a result: batch, padding, page size, chunks, earlier prompts; and totals at every step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import millpond as mp
from millpond.cache.pages.table_bytes import own_bytes
from tests.helpers.matrix.models import llama, prompts

METHODS: dict[str, dict[str, Any]] = {
    "full": {},
    "window": {"sinks": 1},
    "random": {"sinks": 1, "recent": 2},
    "streaming": {"sinks": 2},
    "h2o": {"sinks": 2},
    "tova": {},
    "snapkv": {"window": 4, "kernel": 3, "decode": "evict"},
    "ada": {"score": "h2o/decay=0.9", "alpha": 0.3},
    "no_heavy": {"recent": 4},
    "strided": {"heavy": 0.25},
    "fixed": {"width": 2, "sinks": 1},
}
BUDGET = 14
STEPS = 8


def budget_of(method: str, budget: Any = BUDGET) -> dict[str, Any]:
    return {} if method == "full" else {"budget": budget}


def run(
    method: str,
    ids: Tensor,
    mask: Tensor,
    *,
    chunk: int | None = None,
    steps: int = STEPS,
    heads: str = "gqa",
    dtype: torch.dtype = torch.float64,
    budget: Any = BUDGET,
    **kwargs: Any,
) -> tuple[Tensor, list[Any]]:
    """Greedy tokens (B, steps) and the kept positions [layer][sequence][head] at the end."""
    model = llama(heads, dtype)
    settings = {**budget_of(method, budget), **METHODS[method], **kwargs}
    with torch.no_grad(), mp.compress(model, method=method, **settings) as cache:
        out = model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=steps,
            do_sample=False,
            cache=cache,
            prefill_chunk_size=chunk,
        )
        kept = [[cache.positions(layer, s) for s in range(len(ids))] for layer in range(len(cache.layers))]
        cache.check_integrity()
    return out[:, ids.shape[1] :], kept


@pytest.mark.parametrize("method", METHODS)
def test_batch_and_padding(method: str) -> None:
    """Each sequence of a left-padded batch of unequal lengths goes as it would alone."""
    ids, mask = prompts(3)
    tokens, kept = run(method, ids, mask)
    for s in range(3):
        alone = ids[s, mask[s].bool()][None]
        one, kept_one = run(method, alone, torch.ones_like(alone))
        assert one[0].tolist() == tokens[s].tolist()
        assert [layer[0] for layer in kept_one] == [layer[s] for layer in kept]


@pytest.mark.parametrize("method", [m for m in METHODS if m != "full"])
def test_ratio_is_of_each_sequence_alone(method: str) -> None:
    ids, mask = prompts(3)
    _, kept = run(method, ids, mask, budget="40%")
    for s, length in enumerate(mask.sum(1).tolist()):
        total = sum(len(head) for head in kept[0][s])
        assert total == 2 * round(0.4 * length)


@pytest.mark.covering
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("slots", [1, 4, 64])
def test_page_size(method: str, slots: int) -> None:
    ids, mask = prompts(2)
    assert _same(run(method, ids, mask, page_slots=slots), run(method, ids, mask, page_slots=16))


def _same(a: tuple[Tensor, list[Any]], b: tuple[Tensor, list[Any]]) -> bool:
    return a[0].tolist() == b[0].tolist() and a[1] == b[1]


@pytest.mark.covering
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("chunk", [7, 16])
def test_chunks_without_eviction_between_them(method: str, chunk: int) -> None:
    ids, mask = prompts(2)
    assert _same(
        run(method, ids, mask, chunk=chunk, between_chunks=False), run(method, ids, mask, between_chunks=False)
    )


@pytest.mark.parametrize("method", [m for m in METHODS if m != "full"])
def test_chunks_with_eviction_keep_the_peak_low(method: str) -> None:
    """Between chunks the cache never holds more than the budget, so neither does the pool, but for one chunk."""
    model, (ids, _) = llama(), prompts(1, length=120)
    with torch.no_grad(), mp.compress(model, method=method, budget=BUDGET, page_slots=2, **METHODS[method]) as cache:
        for begin in range(0, 120, 20):
            model(ids[:, begin : begin + 20], cache=cache)
            assert max(max(h) for layer in cache.stats().stored for h in layer) <= 2 * BUDGET
            assert all(sum(h) <= BUDGET * 2 for layer in cache.stats().stored for h in layer)
        pages = -(-BUDGET // 2) * 2 * len(cache.layers)
        assert sum(pool.n_live for pool in cache.pools) <= pages + 2 * len(cache.layers)


@pytest.mark.parametrize("method", METHODS)
def test_a_second_prompt_equals_a_fresh_cache(method: str) -> None:
    model = llama()
    first, second = prompts(2, seed=1), prompts(3, length=33, seed=5)
    expected = run(method, *second)[0]
    with torch.no_grad(), mp.compress(model, method=method, **budget_of(method), **METHODS[method]) as cache:
        for ids, mask in (first, second):
            cache.reset()
            out = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=STEPS, do_sample=False, cache=cache)
        assert out[:, ids.shape[1] :].tolist() == expected.tolist()
        cache.reset()
        assert sum(pool.n_live for pool in cache.pools) == 0
        assert cache.stats().reserved_bytes == 0


@pytest.mark.parametrize("method", [m for m in METHODS if m != "full"])
def test_sizes_at_every_step(method: str) -> None:
    model, (ids, mask) = llama(), prompts(3)
    with torch.no_grad(), mp.compress(model, method=method, budget=BUDGET, page_slots=4, **METHODS[method]) as cache:
        step, seen = ids, mask
        for _ in range(20):
            places = (seen.cumsum(1) - 1).clamp(min=0)[:, -step.shape[1] :]
            logits = model(step, attention_mask=seen, position_ids=places, cache=cache).logits
            for layer in cache.stats().stored:
                for heads in layer:
                    assert sum(heads) == 2 * BUDGET
                    assert min(heads) > 0
                    if method != "ada" and "compete" not in METHODS[method]:
                        assert heads == [BUDGET] * 2
            step = logits[:, -1:].argmax(-1)
            seen = torch.cat([seen, torch.ones(3, 1, dtype=seen.dtype)], 1)


@pytest.mark.parametrize("method", METHODS)
def test_bytes_are_real_and_freed(method: str) -> None:
    """Pages in use follow the entries within one page per head; live pages are what the buffers say."""
    model, (ids, mask) = llama(dtype=torch.float32), prompts(2, length=64)
    settings = {**budget_of(method), **METHODS[method], "page_slots": 4}
    with torch.no_grad(), mp.compress(model, method=method, **settings) as cache:
        model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=8, do_sample=False, cache=cache)
        stats, entry = cache.stats(), (8 + 8) * 4
        entries = sum(n for layer in stats.stored for seq in layer for n in seq)
        regions = len(cache.layers) * 2 * 2
        assert entries * entry <= stats.kv_bytes <= entries * entry + regions * 4 * entry
        assert stats.kv_bytes + stats.metadata_bytes - sum(
            own_bytes(c.table) for c in cache.layer_caches if c.table
        ) == sum(pool.n_live * pool.page_bytes for pool in cache.pools)
        assert stats.seen == [int(n) + 7 for n in mask.sum(1)]
        assert stats.evicted == sum(stats.seen) * 2 * len(cache.layers) - entries
        assert stats.full_kv_bytes == sum(stats.seen) * 2 * len(cache.layers) * entry


@pytest.mark.covering
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("heads", ["mha", "gqa"])
def test_second_turn(method: str, heads: str) -> None:
    """A later turn is taken in and compressed too, the same in a batch as alone."""
    model = llama(heads)
    ids, mask = prompts(2)
    more = torch.randint(2, 96, (2, 20), generator=torch.Generator().manual_seed(9))

    def turns(rows: list[int]) -> tuple[list[list[int]], list[Any]]:
        with torch.no_grad(), mp.compress(model, method=method, **budget_of(method), **METHODS[method]) as cache:
            common = {"max_new_tokens": 5, "do_sample": False, "cache": cache}
            first = model.generate(input_ids=ids[rows], attention_mask=mask[rows], **common)
            text = torch.cat([first, more[rows]], 1)
            seen = torch.cat([mask[rows], torch.ones(len(rows), text.shape[1] - ids.shape[1], dtype=mask.dtype)], 1)
            second = model.generate(input_ids=text, attention_mask=seen, **common)
            kept = [cache.positions(1, s) for s in range(len(rows))]
            return second[:, text.shape[1] :].tolist(), kept

    together, kept = turns([0, 1])
    for s in range(2):
        alone, kept_alone = turns([s])
        assert alone[0] == together[s]
        assert kept_alone[0] == kept[s]
        if method != "full":
            assert sum(len(h) for h in kept[s]) == 2 * BUDGET


@pytest.mark.covering
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("greedy", [False, True])
def test_a_turn_of_one_token_beside_a_longer_one(method: str, greedy: bool) -> None:
    """A sequence whose turn is a single token decodes it, whatever the others of the batch bring."""
    if greedy and method not in ("h2o", "tova"):
        pytest.skip("has no greedy prefill")
    model, (ids, _) = llama(), prompts(2, length=30)
    turn = torch.tensor([[3, 5, 7, 9], [0, 0, 11, 0]])
    mask = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 0]])
    settings = {**budget_of(method, "30%"), **METHODS[method], **({"prefill": "greedy"} if greedy else {})}

    def kept(rows: list[int]) -> list[Any]:
        with torch.no_grad(), mp.compress(model, method=method, **settings) as cache:
            model(ids[rows], cache=cache)
            own = mask[rows].any(0)
            model(
                turn[rows][:, own],
                cache=cache,
                position_ids=30 + mask[rows][:, own].cumsum(1) - 1,
                attention_mask=torch.cat([torch.ones(len(rows), 30, dtype=torch.long), mask[rows][:, own]], 1),
            )
            return [[cache.positions(layer, s) for layer in range(len(cache.layers))] for s in range(len(rows))]

    together = kept([0, 1])
    assert [*kept([0]), *kept([1])] == together


@pytest.mark.parametrize("method", METHODS)
def test_budget_of_everything_equals_full(method: str) -> None:
    model = llama(dtype=torch.float64)
    ids, mask = prompts(3)
    stock = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=STEPS, do_sample=False)
    tokens, kept = run(method, ids, mask, budget=200)
    assert tokens.tolist() == stock[:, ids.shape[1] :].tolist()
    assert kept[0][0][0] == list(range(ids.shape[1] + STEPS - 1))


@pytest.mark.parametrize("method", [m for m in METHODS if m != "full"])
def test_first_token_is_exact(method: str) -> None:
    """The prompt's own attention is full: what is dropped is dropped after it."""
    model = llama()
    ids, _ = prompts(1)
    with torch.no_grad():
        expected = model(ids).logits
        with mp.compress(model, method=method, budget=BUDGET, **METHODS[method]) as cache:
            assert torch.allclose(model(ids, cache=cache).logits, expected, atol=1e-12)


def test_group_of_one_and_duplicated_heads() -> None:
    """G7: KV heads repeated for identical query heads keep the same sets."""
    gqa = llama("gqa")
    ids, mask = prompts(1)
    with torch.no_grad():
        for layer in gqa.model.layers:
            weight = layer.self_attn.q_proj.weight.view(2, 4, 8, 32)
            before = weight.clone()
            weight[:] = weight[:, :1]
            layer._before = before
        try:
            sets = {}
            for reduce in ("mean", "max"):
                with mp.compress(gqa, method="h2o", budget=BUDGET, sinks=2, reduce=reduce) as cache:
                    gqa(ids, cache=cache)
                    sets[reduce] = [cache.positions(layer) for layer in range(2)]
            assert sets["mean"] == sets["max"]
        finally:
            for layer in gqa.model.layers:
                layer.self_attn.q_proj.weight.view(2, 4, 8, 32)[:] = layer._before
                del layer._before
    assert mask.all()
