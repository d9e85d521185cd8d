"""PyramidKV by hand: the line, its clip at the length of the prompt, exact totals, and real memory."""

import pytest
import torch

import millpond as mp
from millpond.errors import BudgetError, OptionError
from millpond.methods import METHODS
from millpond.policy.layer_allocation import Pyramid, split_budget
from tests.helpers.hf.families import family
from tests.helpers.matrix.models import llama, prompts

SNAP = "snapkv/window=4/kernel=3"


def test_the_line() -> None:
    """96 entries beside the window, beta 20: from 2 * 96 - 4.8 = 187.2 down to 96 / 20 = 4.8."""
    assert split_budget(Pyramid(20), 96, 0, [10_000] * 4) == [187, 126, 66, 5]  # of 187.2, 126.4, 65.6, 4.8
    assert split_budget(Pyramid(20), 96 + 32, 32, [10_000] * 4) == [187 + 32, 126 + 32, 66 + 32, 5 + 32]
    deep = split_budget(Pyramid(20), 96, 0, [10_000] * 32)
    assert (deep[0], deep[-1]) == (187, 5)
    assert deep == sorted(deep, reverse=True)


def test_a_short_prompt_has_a_flatter_line() -> None:
    assert split_budget(Pyramid(20), 96, 0, [150] * 4) == [150, 114, 78, 42]
    assert split_budget(Pyramid(20), 96 + 8, 8, [158] * 4) == [158, 122, 86, 50]


@pytest.mark.parametrize("budget", [96, 480, 992, 2016])
def test_the_total_does_not_overshoot(budget: int) -> None:
    """Steps that are rounded down hold 15.1 % more at 96 entries and 32 layers."""
    rounded = [int(budget * 2 - budget // 20) - i * ((2 * budget - 2 * (budget // 20)) // 31) for i in range(32)]
    assert sum(rounded) > 32 * budget
    assert sum(split_budget(Pyramid(20), budget, 0, [100_000] * 32)) == 32 * budget


@pytest.mark.parametrize("budget", [14, "30%"])
def test_layers_hold_what_the_line_says(budget: int | str) -> None:
    """Each sequence of a padded batch has the budgets of its own length, and pages follow."""
    model, (ids, mask) = llama(layers=4), prompts(3, length=60)
    with torch.no_grad(), mp.compress(model, "pyramidkv", budget, score=SNAP, page_slots=1) as cache:
        model(ids, attention_mask=mask, cache=cache, position_ids=(mask.cumsum(1) - 1).clamp(min=0))
        for s, n in enumerate(mask.sum(1).tolist()):
            average = 14 if budget == 14 else round(0.3 * n)
            expected = split_budget(Pyramid(20), average, 4, [n] * 4)
            assert [layer_cache.stored[s].tolist() for layer_cache in cache.layer_caches] == [[b, b] for b in expected]
            assert sum(expected) == 4 * average
        assert sum(pool.n_live for pool in cache.pools) == sum(
            int(layer_cache.stored.sum()) for layer_cache in cache.layer_caches
        )


def test_a_second_prompt_has_budgets_of_its_own() -> None:
    """Of a short prompt the first layer keeps everything; a longer one after it has the steeper line."""
    model = llama(layers=4)
    with torch.no_grad(), mp.compress(model, "pyramidkv", 14, score=SNAP) as cache:
        for length in (18, 60):
            cache.reset()
            model(prompts(1, length=length)[0], cache=cache)
            held = [int(layer_cache.stored[0, 0]) for layer_cache in cache.layer_caches]
            assert held == split_budget(Pyramid(20), 14, 4, [length] * 4)
            assert sum(held) == 4 * 14


@pytest.mark.parametrize("score", ["h2o/sinks=1", "tova", "window"])
def test_over_a_score_that_evicts_totals_hold_at_each_step(score: str) -> None:
    model, (ids, _) = llama(layers=3), prompts(1)
    with torch.no_grad(), mp.compress(model, "pyramidkv", 10, score=score, beta=4.0) as cache:
        model(ids, cache=cache)
        first = cache.stats().stored
        assert sum(layer[0][0] for layer in first) == 3 * 10
        for t in range(8):
            model(ids[:, t : t + 1], cache=cache)
            assert cache.stats().stored == first


def test_ada_shares_each_layer_of_the_pyramid() -> None:
    model, (ids, _) = llama(layers=4), prompts(1, length=60)
    with torch.no_grad(), mp.compress(model, "ada", 14, score=f"pyramidkv/beta=10/score={SNAP}") as cache:
        model(ids, cache=cache)
        held = [layer_cache.stored[0] for layer_cache in cache.layer_caches]
        assert [int(h.sum()) for h in held] == [2 * b for b in split_budget(Pyramid(10), 14, 4, [60] * 4)]
        assert any(h[0] != h[1] for h in held)


def test_sliding_layers_give_what_they_cannot_use_to_the_others() -> None:
    model = family("gemma3").make()  # queries see 12, all and 12 positions; the next query is one of the 12
    ids = torch.randint(3, 96, (1, 50), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), mp.compress(model, "pyramidkv", 16, score="h2o/sinks=1", beta=2.0) as cache:
        model(ids, cache=cache)
        held = [int(layer_cache.stored[0, 0]) for layer_cache in cache.layer_caches]
    assert held == split_budget(Pyramid(2), 16, 1, [11, 50, 11])
    assert sum(held) == 3 * 16


@pytest.mark.parametrize("method", ["pyramidkv", "layer_table"])
def test_a_budget_in_bytes_is_held(method: str) -> None:
    model, (ids, mask) = llama(dtype=torch.float32, layers=3), prompts(3, length=100)
    options = {"score": "h2o"} | ({"table": "5;1"} if method == "layer_table" else {})
    with torch.no_grad(), mp.compress(model, method, "60kB", page_slots=4, **options) as cache:
        model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=20, do_sample=False, cache=cache)
        stats = cache.stats()
        page = cache.pools[0].page_bytes
        assert 60_000 - 2 * 3 * 3 * 2 * page <= stats.kv_bytes + stats.metadata_bytes <= 60_000
        assert len({layer[0][0] for layer in stats.stored}) == 3


def test_budget_below_what_is_protected() -> None:
    with pytest.raises(BudgetError, match="budget 20 is smaller than sinks 0 \\+ recent 32"):
        mp.compress(llama(), "pyramidkv", 20)


def test_a_table_keeps_what_it_says() -> None:
    model, (ids, _) = llama(layers=4), prompts(1, length=60)
    with torch.no_grad(), mp.compress(model, "layer_table", 12, table="24;6;10;8", score="h2o/sinks=1") as cache:
        model(ids, cache=cache)
        assert [layer_cache.stored[0].tolist() for layer_cache in cache.layer_caches] == [
            [24, 24],
            [6, 6],
            [10, 10],
            [8, 8],
        ]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("4;x", "table='4;x' must be at most 1,024 numbers, 0 to 1,000,000"),
        ("", "table='' must be at most 1,024 numbers"),
        ("0;0", "one must be above 0"),
    ],
)
def test_a_table_that_is_none(table: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        METHODS.get("layer_table")(table=table)


def test_a_table_for_another_model() -> None:
    with pytest.raises(OptionError, match="3 layer weights for a model of 2 layers"):
        mp.compress(llama(), "layer_table", 40, table="3;2;1")
