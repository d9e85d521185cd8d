"""Methods whose layers differ: totals over the layers, equality with a mask, and what may never change a result."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import millpond as mp
from tests.helpers.matrix.hidden import equals_a_mask
from tests.helpers.matrix.models import llama, prompts
from tests.helpers.matrix.oracle import Oracle, Rule

SNAP = "snapkv/window=4/kernel=3"
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "pyramidkv": ("pyramidkv", {"score": f"{SNAP}/decode=evict"}),
    "pyramid_h2o": ("pyramidkv", {"score": "h2o/sinks=2", "beta": 5.0}),
    "ada_pyramid": ("ada", {"score": f"pyramidkv/score={SNAP}/decode=evict", "every": 3}),
    "layer_table": ("layer_table", {"score": "h2o/sinks=2", "table": "1;3;2"}),
    "simlayerkv": ("simlayerkv", {"score": f"{SNAP}/decode=evict", "sinks": 2, "recent": 4, "threshold": 0.14}),
}
LAYERS, BUDGET, STEPS = 4, 14, 10


def run(
    case: str,
    ids: Tensor,
    mask: Tensor,
    *,
    chunk: int | None = None,
    budget: Any = BUDGET,
    heads: str = "gqa",
    **settings: Any,
) -> tuple[list[list[int]], list[Any]]:
    """Greedy tokens and the kept positions [sequence][layer][head]."""
    method, options = METHODS[case]
    with torch.no_grad(), mp.compress(llama(heads, layers=LAYERS), method, budget, **options, **settings) as cache:
        out = cache_generate(cache, ids, mask, heads, chunk)
        kept = [[cache.positions(layer, s) for layer in range(LAYERS)] for s in range(len(ids))]
        cache.check_integrity()
    return out[:, ids.shape[1] :].tolist(), kept


def cache_generate(cache: Any, ids: Tensor, mask: Tensor, heads: str = "gqa", chunk: int | None = None) -> Tensor:
    out: Tensor = llama(heads, layers=LAYERS).generate(
        input_ids=ids, attention_mask=mask, max_new_tokens=STEPS, do_sample=False, cache=cache, prefill_chunk_size=chunk
    )
    return out


@pytest.mark.covering
@pytest.mark.parametrize("case", METHODS)
@pytest.mark.parametrize("budget", [BUDGET, "40%"])
def test_totals_are_exact_alone_and_in_a_batch(case: str, budget: Any) -> None:
    ids, mask = prompts(3)
    tokens, kept = run(case, ids, mask, budget=budget)
    for s, n in enumerate(mask.sum(1).tolist()):
        average = BUDGET if budget == BUDGET else round(0.4 * n)
        assert sum(len(head) for layer in kept[s] for head in layer) == LAYERS * 2 * average
        alone = ids[s, mask[s].bool()][None]
        one, kept_one = run(case, alone, torch.ones_like(alone), budget=budget)
        assert (one[0], kept_one[0]) == (tokens[s], kept[s])
    assert any(len({sum(map(len, layer)) for layer in row}) > 1 for row in kept)


@pytest.mark.parametrize("case", METHODS)
def test_pages_and_chunks_change_nothing(case: str) -> None:
    ids, mask = prompts(2)
    whole = run(case, ids, mask, between_chunks=False)
    assert run(case, ids, mask, between_chunks=False, page_slots=1) == whole
    for chunk in (7, 16):
        assert run(case, ids, mask, chunk=chunk, between_chunks=False) == whole


@pytest.mark.covering
@pytest.mark.parametrize("case", METHODS)
@pytest.mark.parametrize("heads", ["mha", "gqa"])
def test_a_budget_of_everything_equals_full(case: str, heads: str) -> None:
    ids, mask = prompts(3)
    stock = llama(heads, layers=LAYERS).generate(
        input_ids=ids, attention_mask=mask, max_new_tokens=STEPS, do_sample=False
    )
    tokens, kept = run(case, ids, mask, budget=60, heads=heads)
    assert tokens == stock[:, ids.shape[1] :].tolist()
    assert kept[0][0][0] == list(range(ids.shape[1] + STEPS - 1))


@pytest.mark.parametrize("case", METHODS)
def test_prompts_and_turns_leave_nothing_behind(case: str) -> None:
    """A second prompt after a reset goes as in a fresh cache; a second turn keeps the total."""
    method, options = METHODS[case]
    first, second = prompts(2, seed=1), prompts(2, length=33, seed=5)
    expected = run(case, *second)
    with torch.no_grad(), mp.compress(llama("gqa", layers=LAYERS), method, BUDGET, **options) as cache:
        cache_generate(cache, *first)
        cache.reset()
        out = cache_generate(cache, *second)
        assert out[:, 33:].tolist() == expected[0]
        more = torch.randint(2, 96, (2, 20), generator=torch.Generator().manual_seed(9))
        mask = torch.cat([second[1], torch.ones(2, STEPS + 20, dtype=torch.long)], 1)
        cache_generate(cache, torch.cat([out, more], 1), mask)
        for s in range(2):
            assert sum(sum(layer[s]) for layer in cache.stats().stored) == LAYERS * 2 * BUDGET
        cache.check_integrity()


class Layered(Oracle):
    """An oracle whose layers have budgets of their own."""

    def __init__(self, rule: Rule, budgets: list[int]) -> None:
        super().__init__(rule)
        self._rule, self._budgets = rule, budgets

    def attend(self, layer: int, *args: Any) -> Tensor:
        self.rule = replace(self._rule, budget=self._budgets[layer])
        return super().attend(layer, *args)


MASKED = {
    # beside the window of 4 there are 10: 19.5, 13.17, 6.83 and 0.5 of them
    "pyramidkv": (
        "pyramidkv",
        {"score": SNAP},
        [24, 17, 11, 4],
        Rule("window", 0, recent=4, window=4, kernel=3, evicts_while_decoding=False),
    ),
    # beside the 2 sinks there are 12: 22.8, 15.6, 8.4 and 1.2 of them
    "pyramid_h2o": (
        "pyramidkv",
        {"score": "h2o/sinks=2/recent=0", "beta": 10.0},
        [25, 18, 10, 3],
        Rule("sum", 0, sinks=2),
    ),
    "ada_pyramid": (
        "ada",
        {"score": f"pyramidkv/score={SNAP}", "alpha": 0.3},
        [24, 17, 11, 4],
        Rule("window", 0, recent=4, window=4, kernel=3, alpha=0.3, evicts_while_decoding=False),
    ),
    "layer_table": (
        "layer_table",
        {"score": "h2o/sinks=2/recent=0.5", "table": "20;8;10;18"},
        [20, 8, 10, 18],
        Rule("sum", 0, sinks=2, recent=0.5),
    ),
}


@pytest.mark.covering
@pytest.mark.parametrize("heads", ["mha", "gqa"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("case", MASKED)
def test_drop_equals_mask(case: str, batch: int, heads: str) -> None:
    method, options, budgets, rule = MASKED[case]
    assert sum(budgets) == LAYERS * BUDGET
    model, (ids, mask) = llama(heads, layers=LAYERS), prompts(batch)
    oracle = Layered(rule, budgets)
    with torch.no_grad(), mp.compress(model, method, BUDGET, page_slots=4, **options) as cache:
        equals_a_mask(model, cache, ids, mask, 20, oracle, within=1e-11)
        for (layer, b, h), head in oracle.heads.items():
            assert cache.positions(layer, b)[h] == head.kept
        cache.check_integrity()


@pytest.mark.parametrize(
    ("method", "options"),
    [("d2o", {}), ("simlayerkv", {"recent": 4}), ("duo_attention", {"across": True, "recent": 4})],
)
def test_what_compares_layers_plans_at_the_end_of_each_pass(method: str, options: dict[str, Any]) -> None:
    """The prompt, or each chunk of it, is held whole no longer than the pass that reads it."""
    model, (ids, _) = llama(layers=3), prompts(1, length=60)
    for chunk in (60, 20):
        with torch.no_grad(), mp.compress(model, method, 16, **options) as cache:
            for part in ids.split(chunk, 1):
                model(part, cache=cache)
                assert sum(int(layer_cache.stored.sum()) for layer_cache in cache.layer_caches) == 3 * 2 * 16
                assert not any(layer_cache.pending for layer_cache in cache.layer_caches)
