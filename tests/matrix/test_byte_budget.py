"""A budget in bytes is never exceeded, side arrays and tables included, and is used as far as pages allow."""

import pytest
import torch

import millpond as mp
from millpond.errors import BudgetError
from tests.matrix.models import llama, prompts


@pytest.mark.parametrize("method", ["h2o", "window", "tova", "ada"])
@pytest.mark.parametrize("batch", [1, 3])
def test_bytes_held_stay_below_the_budget(method: str, batch: int) -> None:
    model, (ids, mask) = llama(dtype=torch.float32), prompts(batch, length=100)
    options = {"score": "h2o"} if method == "ada" else {}
    amount = 40_000 * batch
    with torch.no_grad(), mp.compress(model, method=method, budget=f"{amount}B", page_slots=4, **options) as cache:
        model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=40, do_sample=False, past_key_values=cache)
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
        model(ids, past_key_values=cache)


def test_bytes_that_hold_less_than_is_protected_are_refused() -> None:
    model, (ids, _) = llama(dtype=torch.float32), prompts(1)
    with (
        torch.no_grad(),
        mp.compress(model, method="h2o", budget="8kB", page_slots=8, sinks=6, recent=20) as cache,
        pytest.raises(BudgetError, match=r"smaller than sinks 6 \+ recent 20"),
    ):
        model(ids, past_key_values=cache)
