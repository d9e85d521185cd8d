"""SirLLM: entropies against plain cross-entropy, the kept set against a loop, and what may not change either."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaModel

import millpond as mp
from millpond.errors import CacheMismatchError, OptionError, UnsupportedModelError
from millpond.hf.signals.token_entropy import surprise
from millpond.methods import METHODS
from tests.helpers.hf.families import FAMILIES, shared_model, text
from tests.helpers.matrix.checks import CHECKS
from tests.helpers.matrix.hidden import equals_a_mask, kept_in_any_chunks
from tests.helpers.matrix.models import llama, prompts
from tests.matrix import test_invariance as matrix

BUDGET, SINKS, RECENT = 14, 2, 3
SETTINGS: dict[str, Any] = {"sinks": SINKS, "recent": RECENT}


@pytest.mark.parametrize("check", CHECKS)
def test_matrix(check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(matrix.METHODS, "sirllm", {**SETTINGS, "decay": 0.7})
    CHECKS[check]("sirllm")


def chosen(entropy: dict[int, float], held: list[int], seen: int, budget: int = BUDGET) -> list[int]:
    """The first and newest positions, then those of highest entropy, worked without the package."""
    safe = [j for j in held if j < SINKS or j >= seen - RECENT]
    free = sorted((j for j in held if j not in safe), key=lambda j: (-entropy[j], -j))
    return sorted([*safe, *free[: budget - len(safe)]])


def places(mask: Tensor) -> Tensor:
    return (mask.cumsum(1) - 1).clamp(min=0)


def test_by_hand() -> None:
    """Predictions (1/2, 1/4, 1/4) give ids 0, 1, 2 the entropies log 2, log 4, log 4; an id that is not there, inf."""
    row = torch.tensor([0.5, 0.25, 0.25]).log() + 3  # logits are known up to a constant
    found = surprise(row.expand(4, 3), torch.tensor([0, 1, 2, 3]))
    expected = torch.tensor([2.0, 4.0, 4.0, torch.inf]).log()
    torch.testing.assert_close(found, expected)


def test_entropies_of_a_prompt_are_its_cross_entropies() -> None:
    """Token j against the prediction at j - 1 (the official code is one place off), without pads, in any chunks."""
    model, (ids, mask) = llama(), prompts(3)
    for chunk in (40, 9):
        with torch.no_grad(), mp.compress(model, "sirllm", 100, **SETTINGS) as cache:
            for begin in range(0, 40, chunk):
                here = slice(begin, begin + chunk)
                seen = mask[:, : begin + chunk]
                model(ids[:, here], attention_mask=seen, position_ids=places(seen)[:, here], cache=cache)
            for s in range(3):
                own = ids[s, mask[s].bool()]
                expected = torch.nn.functional.cross_entropy(model(own[None]).logits[0, :-1], own[1:], reduction="none")
                for layer_cache in cache.layer_caches:
                    found = layer_cache.read(s).scores
                    assert found[:, 0].isinf().all()
                    torch.testing.assert_close(found[:, 1:], expected.float().expand(2, -1), atol=1e-5, rtol=0)


@pytest.mark.parametrize("batch", [1, 3])
def test_the_kept_set_at_every_step(batch: int) -> None:
    """A loop over positions with the entropies of the logits that the model gave."""
    model, (ids, mask) = llama(), prompts(batch)
    later = torch.randint(2, 96, (batch, 25), generator=torch.Generator().manual_seed(2))
    entropy: list[dict[int, float]] = [{0: float("inf")} for _ in range(batch)]
    held = [list(range(int(n))) for n in mask.sum(1)]
    with torch.no_grad(), mp.compress(model, "sirllm", BUDGET, page_slots=4, **SETTINGS) as cache:
        logits = model(ids, attention_mask=mask, position_ids=places(mask), cache=cache).logits
        for s in range(batch):
            own, p = ids[s, mask[s].bool()].tolist(), logits[s, mask[s].bool()].log_softmax(-1)
            entropy[s].update({j: -float(p[j - 1, own[j]]) for j in range(1, len(own))})
            held[s] = chosen(entropy[s], held[s], len(own))
        for t in range(later.shape[1]):
            last = logits[:, -1].log_softmax(-1)
            mask = torch.cat([mask, mask.new_ones(batch, 1)], 1)
            step = {"attention_mask": mask, "position_ids": places(mask)[:, -1:], "cache": cache}
            logits = model(later[:, t : t + 1], **step).logits
            for s in range(batch):
                new = int(mask[s].sum()) - 1
                entropy[s][new] = -float(last[s, later[s, t]])
                held[s] = chosen(entropy[s], [*held[s], new], new + 1)
                assert [cache.positions(layer, s) for layer in (0, 1)] == [[held[s]] * 2] * 2, f"step {t}"
        cache.check_integrity()


@pytest.mark.parametrize("decay", [1.0, 0.5])
def test_what_is_remembered_decays_with_every_round(decay: float) -> None:
    """Rounds begin with a prompt behind decoded tokens; a prompt in pieces is one round."""
    model = llama()
    tokens = torch.randint(2, 96, (1, 40), generator=torch.Generator().manual_seed(3))
    passes = [(0, 9), (9, 14), *((t, t + 1) for t in range(14, 18)), (18, 25), (25, 26), (26, 33), (33, 40)]
    rounds = [0] * 18 + [1] * 8 + [2] * 14  # the round in which each token came
    with torch.no_grad(), mp.compress(model, "sirllm", 100, decay=decay, **SETTINGS) as cache:
        for begin, end in passes:
            model(tokens[:, begin:end], cache=cache)
        found = cache.layer_caches[1].read(0).scores[0]
        p = model(tokens).logits[0].log_softmax(-1)
    expected = [-float(p[j - 1, int(tokens[0, j])]) * decay ** (2 - rounds[j]) for j in range(1, 40)]
    torch.testing.assert_close(found[1:], torch.tensor(expected), atol=1e-5, rtol=0)


def test_decay_decides_what_stays() -> None:
    kept = {}
    model, (ids, _) = llama(), prompts(1)
    for decay in (1.0, 0.01):
        with torch.no_grad(), mp.compress(model, "sirllm", BUDGET, decay=decay, **SETTINGS) as cache:
            model(ids[:, :25], cache=cache)
            model(ids[:, 25:26], cache=cache)
            model(ids[:, 26:], cache=cache)
            kept[decay] = cache.positions(0)[0]
    newest = [j for j in range(26, 40) if j in kept[0.01]]
    assert len(newest) == BUDGET - SINKS  # what came before weighs next to nothing
    assert kept[1.0] != kept[0.01]


def test_growing() -> None:
    """Without eviction the cache grows, remembers what the decoded tokens were worth, and the next turn decides."""
    model, (ids, _) = llama(), prompts(1)
    with torch.no_grad(), mp.compress(model, "sirllm", BUDGET, decode="grow", recent=0) as cache:
        model(ids[:, :20], cache=cache)
        logits = model(ids[:, :20]).logits[:, -1]
        for t in range(20, 26):
            assert len(cache.positions(0)[0]) == BUDGET + t - 20
            logits = logits.log_softmax(-1)
            step = model(ids[:, t : t + 1], cache=cache).logits[:, -1]
            entry = cache.layer_caches[0].read(0)
            assert float(entry.scores[0, -1]) == pytest.approx(-float(logits[0, ids[0, t]]), abs=1e-5)
            logits = step
        model(ids[:, 26:], cache=cache)
        assert [len(h) for h in cache.positions(0)] == [BUDGET] * 2


def test_drop_equals_mask() -> None:
    model, (ids, mask) = llama("gqa"), prompts(2)
    with torch.no_grad(), mp.compress(model, "sirllm", BUDGET, page_slots=4, **SETTINGS) as cache:
        equals_a_mask(model, cache, ids, mask, 12)
        assert cache.stats().evicted > 0


@pytest.mark.parametrize("name", [*(f.name for f in FAMILIES if f.windows), "deepseek_v3", "cohere"])
def test_windows_latents_and_scaled_logits(name: str) -> None:
    """The model's own logits count, whatever it does to them (softcap, scale)."""
    model, ids = shared_model(name), text(1, 30)
    kept = kept_in_any_chunks(model, ids, 24, "sirllm", budget=9, **SETTINGS)
    assert any(len(head) < 24 for layer in kept for head in layer)
    with torch.no_grad(), mp.compress(model, "sirllm", 100, **SETTINGS) as cache:
        p = model(ids, cache=cache).logits[0].log_softmax(-1)
        dense = cache.layer_caches[1].read(0)
    for j, found in zip(dense.positions[0].tolist(), dense.scores[0].tolist(), strict=True):
        assert j == 0 or found == pytest.approx(-float(p[j - 1, ids[0, j]]), abs=1e-4)


def test_beams_carry_their_predictions_along() -> None:
    model, (ids, mask) = llama(), prompts(2)
    beams = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False, "num_beams": 3}
    expected = model.generate(input_ids=ids, **beams)
    with torch.no_grad(), mp.compress(model, "sirllm", 100, **SETTINGS) as cache:
        assert torch.equal(model.generate(input_ids=ids, cache=cache, **beams), expected)
    follows = torch.randint(2, 96, (2, 3), generator=torch.Generator().manual_seed(4))
    kept = []
    for rows in ([0, 1], [0], [1]):
        with torch.no_grad(), mp.compress(model, "sirllm", BUDGET, recent=0) as cache:
            model(ids[:1], cache=cache)
            cache.batch_repeat_interleave(2)
            cache.batch_select_indices(torch.tensor([0, 1][: len(rows)]))
            for t in range(3):
                model(follows[rows, t : t + 1], cache=cache)
            kept.append([cache.layer_caches[0].read(s).scores.tolist() for s in range(len(rows))])
    assert kept[0] == [*kept[1], *kept[2]]


def test_copies_in_the_middle_of_what_waits() -> None:
    """Layers are told of decoded tokens when these can leave; rows that part before that go on as they would alone."""
    model, (ids, _) = llama(), prompts(1)
    later = torch.randint(2, 96, (2, 21), generator=torch.Generator().manual_seed(4))
    later[1, :7] = later[0, :7]
    kept = []
    for rows in ([0, 1], [0], [1]):
        with torch.no_grad(), mp.compress(model, "sirllm", BUDGET, sinks=2, recent=6) as cache:
            model(ids, cache=cache)
            for t in range(7):
                model(later[:1, t : t + 1], cache=cache)
            cache.batch_repeat_interleave(len(rows))
            for t in range(7, 21):
                model(later[rows, t : t + 1], cache=cache)
            kept.append([cache.positions(0, s) for s in range(len(rows))])
    assert kept[0] == [*kept[1], *kept[2]]
    assert kept[1] != kept[2]


def test_a_sequence_that_pauses() -> None:
    """Steps that bring one sequence a token and the other a pad leave both as they would be alone."""
    model, (ids, _) = llama(), prompts(1)
    later = torch.randint(2, 96, (2, 20), generator=torch.Generator().manual_seed(4))
    comes = torch.rand(2, 20, generator=torch.Generator().manual_seed(5)) < 0.7
    kept = []
    for rows in ([0, 1], [0], [1]):
        with torch.no_grad(), mp.compress(model, "sirllm", BUDGET, sinks=2, recent=5) as cache:
            model(ids.repeat(len(rows), 1), cache=cache)
            mask = torch.ones(len(rows), 40, dtype=torch.long)
            for t in range(20):
                if comes[rows, t].any():
                    mask = torch.cat([mask, comes[rows, t : t + 1].long()], 1)
                    at = (mask.cumsum(1) - 1)[:, -1:]
                    model(later[rows, t : t + 1], attention_mask=mask, position_ids=at, cache=cache)
            kept.append([cache.positions(0, s) for s in range(len(rows))])
    assert kept[0] == [*kept[1], *kept[2]]


@pytest.mark.parametrize("asked", [0, 1, 3, torch.tensor([2, 5])])
@pytest.mark.parametrize("as_tuple", [False, True])
def test_the_caller_gets_the_logits_that_it_asked_for(asked: Any, as_tuple: bool) -> None:
    model, (ids, _) = llama(), prompts(1)
    with torch.no_grad():
        expected = model(ids, logits_to_keep=asked).logits
        with mp.compress(model, "sirllm", 100, **SETTINGS) as cache:
            options = {"logits_to_keep": asked, "return_dict": not as_tuple}
            out = model(ids, cache=cache, **options)
            assert (cache.layer_caches[0].read(0).scores > 0).all()
        assert model(ids).logits.shape[1] == 40  # the hooks are gone
    torch.testing.assert_close(out[0] if as_tuple else out.logits, expected, atol=1e-12, rtol=0)


def test_what_it_cannot_do_is_refused() -> None:
    model, (ids, mask) = llama(), prompts(1)
    with torch.no_grad(), mp.compress(model, "sirllm", BUDGET, **SETTINGS) as cache:
        with pytest.raises(CacheMismatchError, match="only its decoder was called; call the model itself"):
            model.model(ids, cache=cache)
        with pytest.raises(CacheMismatchError, match="pass input_ids"):
            model(inputs_embeds=model.model.embed_tokens(ids), cache=cache)
        model(ids, cache=cache)
        assert len(cache.positions(0)[0]) == BUDGET
        cache.reset()
        with pytest.raises(OptionError, match="assisted generation"):
            model.generate(
                input_ids=ids[:, :8].repeat(1, 5),
                attention_mask=mask,
                max_new_tokens=12,
                do_sample=False,
                cache=cache,
                prompt_lookup_num_tokens=3,
            )
    with pytest.raises(UnsupportedModelError, match="LlamaModel predicts no tokens"):
        mp.compress(LlamaModel(model.config).eval(), "sirllm")
    with pytest.raises(OptionError, match=r"decay=0 must be above 0 and at most 1"):
        METHODS.get("sirllm")(decay=0)
    for method in ("ada", "chunkkv"):
        with pytest.raises(OptionError, match="score"):
            METHODS.get(method)(score="sirllm")
