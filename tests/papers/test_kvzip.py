"""KVzip: scores against transformers' own attention over prompt, question and repetition; what may not change them."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

import millpond as mp
from millpond.errors import OptionError
from millpond.methods import METHODS
from millpond.policy.reconstruction_policy import ReconstructionPolicy
from tests.helpers.hf.families import FAMILIES, shared_model, text
from tests.helpers.matrix.hidden import equals_a_mask, kept_in_any_chunks
from tests.helpers.matrix.models import llama, prompts
from tests.matrix import test_invariance as matrix

ASK = [5, 6, 7]
#: One layer alone, so that a plain reference of a layer tells what it keeps; `across` is tested by itself.
SETTINGS: dict[str, Any] = {"ask": "5;6;7", "sinks": 2, "across": False}
CHECKS: dict[str, Callable[[str], None]] = {
    "batch": matrix.test_batch_and_padding,
    "reset": matrix.test_a_second_prompt_equals_a_fresh_cache,
    "bytes": matrix.test_bytes_are_real_and_freed,
    "everything": matrix.test_budget_of_everything_equals_full,
    "first token": matrix.test_first_token_is_exact,
    "pages": lambda method: matrix.test_page_size(method, 4),
    "chunks": lambda method: matrix.test_chunks_without_eviction_between_them(method, 7),
}


@pytest.mark.parametrize("check", CHECKS)
def test_matrix(check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(matrix.METHODS, "kvzip", {**SETTINGS, "chunk": 16})
    CHECKS[check]("kvzip")


def scores_of(model: LlamaForCausalLM, ids: Tensor, chunk: int, first: int = 0) -> list[Tensor]:
    """(heads, n) of each layer, from one uncompressed pass over text, question and chunk for each chunk."""
    eager = LlamaForCausalLM(deepcopy(model.config)).double().eval()
    eager.load_state_dict(model.state_dict())
    eager.set_attn_implementation("eager")
    n = ids.shape[1]
    best = [torch.zeros(2, n, dtype=torch.float64) for _ in model.model.layers]
    for begin in range(first, n, chunk):
        whole = torch.cat([ids, torch.tensor([ASK]), ids[:, begin : begin + chunk]], 1)
        for layer, p in enumerate(eager(whole, output_attentions=True).attentions):
            found = p[0, :, n:, :n].amax(1).view(2, -1, n).amax(1)
            best[layer] = torch.maximum(best[layer], found)
    return best


def best_of(scores: Tensor, total: int, sinks: int) -> list[list[int]]:
    """Positions of each of two heads: the sinks, and the best of both together, `total` in all."""
    flat = sorted(((float(scores[h, j]), h, j) for h in (0, 1) for j in range(sinks, scores.shape[1])), reverse=True)
    chosen = [(h, j) for _, h, j in flat[: total - 2 * sinks]]
    return [sorted([*range(sinks), *(j for h, j in chosen if h == head)]) for head in (0, 1)]


def expected(
    model: LlamaForCausalLM, ids: Tensor, chunk: int, budget: int, sinks: int, first: int = 0
) -> list[list[list[int]]]:
    """Positions kept [layer][head] with as many in each layer."""
    return [best_of(scores, 2 * budget, sinks) for scores in scores_of(model, ids, chunk, first)]


@pytest.mark.parametrize("chunk", [100, 16])
def test_layers_compete_for_one_budget(chunk: int) -> None:
    """The best of all layers and heads, but for the rounding to whole entries per head; in a batch as alone."""
    model, (ids, mask), sinks, budget = deepcopy(llama()), prompts(2), 2, 12
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight *= 4  # sharper attention, higher scores
    with torch.no_grad(), mp.compress(model, "kvzip", budget, **SETTINGS | {"across": True}, chunk=chunk) as cache:
        model(ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0), cache=cache)
        kept = [[cache.positions(layer, s) for layer in (0, 1)] for s in (0, 1)]
    for s in (0, 1):
        scores = [found.detach() for found in scores_of(model, ids[s, mask[s].bool()][None], chunk)]
        flat = torch.cat([found[:, sinks:].flatten() for found in scores])
        least = flat.topk(2 * len(scores) * (budget - sinks)).values.min()
        totals = [sum(map(len, heads)) for heads in kept[s]]
        assert sum(totals) == 2 * budget * len(scores)
        assert len(set(totals)) > 1, "layers differ"
        for found, heads, total in zip(scores, kept[s], totals, strict=True):
            assert heads == best_of(found, total, sinks)
            assert abs(total - 2 * sinks - int((found[:, sinks:] >= least).sum())) <= 2


@pytest.mark.parametrize("chunk", [100, 16])
def test_kept_is_what_the_repetition_looks_at(chunk: int) -> None:
    model, (ids, mask) = llama(), prompts(3)
    with torch.no_grad(), mp.compress(model, "kvzip", 14, chunk=chunk, **SETTINGS) as cache:
        places = (mask.cumsum(1) - 1).clamp(min=0)
        model(ids, attention_mask=mask, position_ids=places, cache=cache)
        kept = [[cache.positions(layer, s) for layer in (0, 1)] for s in range(3)]
        assert kept == [expected(model, ids[s, mask[s].bool()][None], chunk, 14, 2) for s in range(3)]
        assert any(len(a) != len(b) for row in kept for a, b in row)
        assert cache.stats().seen == mask.sum(1).tolist()
        cache.check_integrity()


@pytest.mark.parametrize("chunk", [100, 16])
def test_the_mark_of_a_beginning_is_not_repeated(chunk: int) -> None:
    model, ids = llama(), prompts(1)[0]
    ids[0, 0] = model.config.bos_token_id
    with torch.no_grad(), mp.compress(model, "kvzip", 14, chunk=chunk, **SETTINGS) as cache:
        model(ids, cache=cache)
        kept = [cache.positions(layer, 0) for layer in (0, 1)]
        assert kept == expected(model, ids, chunk, 14, 2, first=1) != expected(model, ids, chunk, 14, 2)


def test_a_later_turn_is_repeated_too() -> None:
    """The turn and what was decoded before it are repeated; in a batch as alone, and older scores are kept."""
    model, (ids, mask) = llama(), prompts(2)
    more = torch.randint(2, 96, (2, 12), generator=torch.Generator().manual_seed(9))
    found = []
    for rows in ([0, 1], [0], [1]):
        with torch.no_grad(), mp.compress(model, "kvzip", 14, **SETTINGS) as cache:
            common = {"max_new_tokens": 5, "do_sample": False, "cache": cache}
            own = mask[rows].any(0)
            first = model.generate(input_ids=ids[rows][:, own], attention_mask=mask[rows][:, own], **common)
            scores = [cache.layer_caches[0].read(s) for s in range(len(rows))]
            whole = torch.cat([first, more[rows]], 1)
            seen = torch.cat([mask[rows][:, own], torch.ones(len(rows), 17, dtype=mask.dtype)], 1)
            model.generate(input_ids=whole, attention_mask=seen, **common)
            kept = [[cache.positions(layer, s) for layer in (0, 1)] for s in range(len(rows))]
            found.append(kept)
            for s in range(len(rows)):
                n = int(seen[s].sum())
                assert all(sum(p < n for head in layer for p in head) == 2 * 14 for layer in kept[s])
                old, new = scores[s], cache.layer_caches[0].read(s)
                for h in (0, 1):
                    before = dict(zip(old.positions[h].tolist(), old.scores[h].tolist(), strict=True))
                    after = dict(zip(new.positions[h].tolist(), new.scores[h].tolist(), strict=True))
                    assert all(after[p] >= x for p, x in before.items() if p in after and p >= 0)
                    assert all(after[p] > 0 for p in after if 0 <= p < n)
    assert found[0] == [*found[1], *found[2]]


def test_drop_equals_mask() -> None:
    model, (ids, mask) = llama("gqa"), prompts(2)
    with torch.no_grad(), mp.compress(model, "kvzip", 14, page_slots=4, **SETTINGS) as cache:
        equals_a_mask(model, cache, ids, mask, 6)


@pytest.mark.parametrize("name", [*(f.name for f in FAMILIES if f.windows), "deepseek_v3"])
def test_windows_and_latents(name: str) -> None:
    model, ids = shared_model(name), text(1, 30)
    kept = kept_in_any_chunks(model, ids, 24, "kvzip", budget=9, **SETTINGS)
    assert any(len(head) < 24 for layer in kept for head in layer)


def test_assisted_generation_is_refused() -> None:
    model, (ids, mask) = llama(), prompts(1)
    ids = ids[:, :8].repeat(1, 5)  # so that drafts are found
    with mp.compress(model, "kvzip", 16, **SETTINGS) as cache, pytest.raises(OptionError, match="assisted generation"):
        model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=12,
            do_sample=False,
            cache=cache,
            prompt_lookup_num_tokens=3,
        )


def test_options() -> None:
    for ask, ids in (("5;6", (5, 6)), ("none", ()), ("Say it again:", None)):
        policy = METHODS.get("kvzip")(ask=ask)
        assert isinstance(policy, ReconstructionPolicy)
        assert policy.ids == ids
    with pytest.raises(OptionError, match="which a tokenizer spells: pass tokenizer= to compress"):
        mp.compress(llama(), "kvzip")
    with pytest.raises(OptionError, match="chunk=0 must be 1 to 16,777,216"):
        METHODS.get("kvzip")(chunk=0)
    with pytest.raises(OptionError, match="cannot be the score of another method"):
        METHODS.get("chunkkv")(score="kvzip")
