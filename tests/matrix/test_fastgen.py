"""FastGen through the checks of the matrix, with and without a cap, on models with windows, latents and drafts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import millpond as mp
from millpond.errors import CacheMismatchError
from millpond.policy.needs import HeadRule
from tests.helpers.hf.families import FAMILIES, shared_model, text
from tests.helpers.matrix.hidden import equals_a_mask, kept_in_any_chunks
from tests.helpers.matrix.models import llama, prompts
from tests.matrix import test_invariance as matrix

CLASSES: dict[str, Any] = {"special": "2;3;4", "punctuation": "5;6;7;8;9;10;11;12"}
MIXED: dict[str, Any] = {**CLASSES, "threshold": 0.87, "frequent": 0.2, "local": 0.2}
CHECKS: dict[str, Callable[[str], None]] = {
    "batch": matrix.test_batch_and_padding,
    "peak": matrix.test_chunks_with_eviction_keep_the_peak_low,
    "reset": matrix.test_a_second_prompt_equals_a_fresh_cache,
    "bytes": matrix.test_bytes_are_real_and_freed,
    "first token": matrix.test_first_token_is_exact,
    "pages": lambda method: matrix.test_page_size(method, 4),
    "chunks": lambda method: matrix.test_chunks_without_eviction_between_them(method, 7),
    "turn of one": lambda method: matrix.test_a_turn_of_one_token_beside_a_longer_one(method, False),
}
#: Where every head keeps everything, the cap decides alone and the total is exact.
EXACT: dict[str, Callable[[str], None]] = {
    "ratio": matrix.test_ratio_is_of_each_sequence_alone,
    "sizes": matrix.test_sizes_at_every_step,
    "second turn": lambda method: matrix.test_second_turn(method, "gqa"),
    "everything": matrix.test_budget_of_everything_equals_full,
}


@pytest.mark.covering
@pytest.mark.parametrize("budget", [None, 14])
@pytest.mark.parametrize("check", CHECKS)
def test_matrix(check: str, budget: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if budget is None and check == "peak":
        pytest.skip("without a budget the rules alone bound the cache")
    monkeypatch.setitem(matrix.METHODS, "fastgen", MIXED)
    if budget is None:
        monkeypatch.setattr(matrix, "budget_of", lambda method, budget=None: {})
    CHECKS[check]("fastgen")


@pytest.mark.parametrize("check", EXACT)
def test_matrix_of_the_cap(check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(matrix.METHODS, "fastgen", {**CLASSES, "threshold": 1.0})
    EXACT[check]("fastgen")


def greedy(model: Any, ids: Tensor, mask: Tensor, cache: Any, steps: int = 12, **options: Any) -> list[list[int]]:
    out: Tensor = model.generate(
        input_ids=ids, attention_mask=mask, max_new_tokens=steps, do_sample=False, cache=cache, **options
    )
    return out[:, ids.shape[1] :].tolist()


@pytest.mark.parametrize("heads", ["mha", "gqa"])
def test_a_threshold_of_one_equals_full(heads: str) -> None:
    model, (ids, mask) = llama(heads), prompts(3)
    with torch.no_grad(), mp.compress(model, "fastgen", threshold=1.0, **CLASSES) as cache:
        tokens = greedy(model, ids, mask, cache)
        assert cache.stats().evicted == 0
    assert tokens == greedy(model, ids, mask, None)


def test_a_threshold_of_zero_keeps_special_tokens_alone() -> None:
    model, (ids, mask) = llama(), prompts(3)
    with torch.no_grad(), mp.compress(model, "fastgen", threshold=0.0, **CLASSES) as cache:
        tokens = greedy(model, ids, mask, cache)
        for s in range(3):
            fed = [*ids[s, mask[s].bool()].tolist(), *tokens[s][:-1]]
            expected = [j for j, token in enumerate(fed) if j == 0 or token in (2, 3, 4)]
            assert cache.positions(0, s) == cache.positions(1, s) == [expected] * 2


@pytest.mark.parametrize("budget", [None, 14])
def test_drop_equals_mask(budget: int | None) -> None:
    """Outputs are those of a full cache that hides what was dropped; heads of several kinds take part."""
    model, (ids, mask) = llama("gqa"), prompts(2)
    with torch.no_grad(), mp.compress(model, "fastgen", budget, page_slots=4, **MIXED) as cache:
        equals_a_mask(model, cache, ids, mask, 10)
        assert (
            len(
                {
                    k
                    for layer_cache in cache.layer_caches
                    if layer_cache.table is not None
                    for k in layer_cache.table.head_rules.tolist()
                }
            )
            > 1
        )
        assert cache.stats().evicted > 0
        cache.check_integrity()


def test_drafts_are_taken_back() -> None:
    model, (ids, mask) = llama(), prompts(1)
    ids = ids[:, :8].repeat(1, 5)  # so that drafts are found
    with torch.no_grad(), mp.compress(model, "fastgen", 16, **MIXED) as cache:
        plain = greedy(model, ids, mask, cache, 20)
        kept = [cache.positions(layer) for layer in range(2)]
        cache.reset()
        assert greedy(model, ids, mask, cache, 20, prompt_lookup_num_tokens=3) == plain
        assert [cache.positions(layer) for layer in range(2)] == kept
        cache.check_integrity()


def test_copies_go_their_own_way() -> None:
    """Rows that are copied after the prompt decode as they would alone."""
    model, (ids, _) = llama(), prompts(1)
    later = torch.randint(2, 96, (2, 9), generator=torch.Generator().manual_seed(4))
    kept = []
    for rows in ([0, 1], [0], [1]):
        with torch.no_grad(), mp.compress(model, "fastgen", **MIXED) as cache:
            model(ids, cache=cache)
            cache.batch_repeat_interleave(len(rows))
            for t in range(9):
                model(later[rows, t : t + 1], cache=cache)
            kept.append([[cache.positions(layer, s) for layer in range(2)] for s in range(len(rows))])
            cache.check_integrity()
    assert kept[0] == [*kept[1], *kept[2]]


@pytest.mark.parametrize("name", [*(f.name for f in FAMILIES if f.windows), "deepseek_v3"])
def test_windows_and_latents(name: str) -> None:
    """A prompt in chunks that is planned once keeps what one in a piece keeps, and hidden entries leave."""
    model, ids = shared_model(name), text(1, 30)
    kept = kept_in_any_chunks(model, ids, 24, "fastgen", threshold=0.8, special="2;3", punctuation="4;5;6")
    assert any(len(head) < 30 for layer in kept for head in layer)


def test_the_model_must_be_given_ids() -> None:
    model, (ids, _) = llama(), prompts(1)
    with torch.no_grad(), mp.compress(model, "fastgen", **MIXED) as cache:
        with pytest.raises(CacheMismatchError, match="pass input_ids"):
            model(inputs_embeds=model.model.embed_tokens(ids), cache=cache)
        cache.reset()
        model(ids, cache=cache)
        model.model(ids[:, :2], cache=cache)
        assert cache.layer_caches[0].table is not None
        assert cache.layer_caches[0].table.head_rules.max() <= HeadRule.FULL
        assert cache.stats().seen == [42]
