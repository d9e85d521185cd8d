"""A budget in bytes is never exceeded, side arrays and tables included, and is used as far as pages allow."""

import pytest
import torch

import millpond as mp
from millpond.errors import BudgetError, OptionError
from tests.helpers.matrix.bounds import OPTIONS, held
from tests.helpers.matrix.hidden import equals_a_mask
from tests.helpers.matrix.models import llama, prompts
from tests.matrix.test_codecs import llama as wide_llama


@pytest.mark.covering
@pytest.mark.parametrize("method", ["h2o", "window", "tova", "ada"])
@pytest.mark.parametrize("batch", [1, 3])
def test_bytes_held_stay_below_the_budget(method: str, batch: int) -> None:
    model, (ids, mask) = llama(dtype=torch.float32), prompts(batch, length=100)
    options = {"score": "h2o"} if method == "ada" else {}
    amount = 40_000 * batch
    with torch.no_grad(), mp.compress(model, method=method, budget=f"{amount}B", page_slots=4, **options) as cache:
        model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=40, do_sample=False, cache=cache)
        stats = cache.stats()
        held = stats.kv_bytes + stats.metadata_bytes
        one_page_per_head = sum(pool.page_bytes for pool in cache.pools) * 2 * 2 * batch
        assert held <= amount
        assert held >= amount - 2 * one_page_per_head
        assert stats.evicted > 0


def test_bytes_that_hold_no_page_are_refused() -> None:
    model, (ids, _) = llama(dtype=torch.float32), prompts(1)
    with (
        torch.no_grad(),
        mp.compress(model, method="h2o", budget="3kB", page_slots=16) as cache,
        pytest.raises(BudgetError, match=r"3000 bytes leaves 750 bytes to each of 4 heads .* less than one page"),
    ):
        model(ids, cache=cache)


def test_bytes_that_hold_less_than_is_protected_are_refused() -> None:
    model, (ids, _) = llama(dtype=torch.float32), prompts(1)
    with (
        torch.no_grad(),
        mp.compress(model, method="h2o", budget="8kB", page_slots=8, sinks=6, recent=20) as cache,
        pytest.raises(BudgetError, match=r"smaller than sinks 6 \+ recent 20"),
    ):
        model(ids, cache=cache)


@pytest.mark.parametrize("method", OPTIONS)
def test_no_method_holds_more_after_its_prompt(method: str) -> None:
    """Prompts that fill the budget and a short one that fills it while decoding, and a later turn."""
    model = llama(dtype=torch.float32)
    for batch, length, steps, turn in ((2, 60, 8, 20), (1, 8, 50, 0)):
        amount = 15_000 * batch
        found = held(model, method, amount, "auto", batch, length, steps, turn, **OPTIONS[method])
        assert max(found) <= amount
        assert max(found) > (0.3 if method == "fastgen" else 0.6) * amount, "a budget is there to be used"


@pytest.mark.covering
@pytest.mark.parametrize("codec", ["int4", "kivi2"])
@pytest.mark.parametrize("method", ["h2o", "snapkv", "ada", "pyramidkv", "duo_attention", "kvzip", "fastgen"])
def test_no_method_holds_more_as_codes(method: str, codec: str) -> None:
    found = held(wide_llama(), method, 250_000, codec, 1, 200, 70, **OPTIONS[method])
    assert 80_000 < max(found) <= 250_000


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["auto", "bf16", "int8", "int4", "int3", "kivi2", "rotated4", "fp8"])
@pytest.mark.parametrize("method", OPTIONS)
def test_no_method_holds_more_whatever_the_numbers(method: str, codec: str) -> None:
    model = wide_llama()
    try:
        mp.compress(model, method, 100, codec, **OPTIONS[method]).close()
    except OptionError as refused:
        pytest.skip(str(refused))
    for batch, length, steps, turn, amount in (
        (1, 200, 60, 20, 250_000),
        (2, 90, 70, 90, 500_000),
        (1, 20, 150, 0, 150_000),
    ):
        assert max(held(model, method, amount, codec, batch, length, steps, turn, **OPTIONS[method])) <= amount


@pytest.mark.parametrize("options", [{}, {"decode": "once"}])
def test_what_was_decoded_leaves_before_what_a_prompt_kept(options: dict[str, str]) -> None:
    """Up to half of a full cache is the newest tokens, the rest what the plan ranked highest; then decoded ones go."""
    model, (ids, _) = llama(dtype=torch.float32), prompts(1, length=100)
    with torch.no_grad(), mp.compress(model, "snapkv", "20kB", page_slots=4, window=4, **options) as cache:
        model(ids, cache=cache)
        planned = [set(row) for row in cache.positions(0)]
        budget = len(planned[0])
        assert 40 < budget < 90
        for t in range(100, 100 + 2 * budget):
            model(ids[:, :1], cache=cache)
            for before, row in zip(planned, cache.positions(0), strict=True):
                assert len(row) == budget
                assert set(row) <= before | set(range(100, t + 1))
                assert set(row) >= set(range(max(100, t + 1 - budget // 2), t + 1))
        for before, row in zip(planned, cache.positions(0), strict=True):
            assert len(before & set(row)) == budget - budget // 2, "the better half of the prompt stays for good"


@pytest.mark.parametrize("method", ["snapkv", "ada", "keydiff", "duo_attention", "kvzip", "pyramidkv"])
def test_drop_equals_mask_where_a_budget_in_bytes_is_full(method: str) -> None:
    model, (ids, mask) = llama("gqa"), prompts(2)
    options = {"window": 4} if method == "snapkv" else OPTIONS[method]
    if method in ("ada", "pyramidkv"):
        options = {"score": "snapkv/window=4"}
    with torch.no_grad(), mp.compress(model, method, "30kB", page_slots=4, **options) as cache:
        equals_a_mask(model, cache, ids, mask, 12)
        stats = cache.stats()
    assert stats.evicted > 0
    assert stats.kv_bytes <= 30_000


def test_once_compresses_again_only_to_stay_inside_the_bytes() -> None:
    model = llama(dtype=torch.float32)
    found = held(model, "snapkv", 20_000, "auto", 1, 60, 10, 60, window=4, decode="once")
    assert max(found) <= 20_000


def test_bytes_that_hold_nothing_beside_what_gathers_are_refused() -> None:
    with pytest.raises(BudgetError, match=r"30000 bytes holds no entry of each of 4 heads .* raise the budget"):
        held(llama(dtype=torch.float32), "rkv", 30_000, "auto", 1, 40, 0)
