"""Gradients, inference mode, dropout, masks: whatever mode a caller is in, nothing is silently wrong."""

import pytest
import torch

import millpond as mp
from hf.test_assisted import repeating
from tests.helpers.hf.families import family, generate, left_padded, one, shared_model, text

MODES = [torch.no_grad, torch.inference_mode, torch.enable_grad]


@pytest.mark.covering
@pytest.mark.parametrize("name", ["llama", "gemma2", "deepseek_v3"])
@pytest.mark.parametrize("method", ["full", "h2o", "streaming"])
@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 1, 0)])
def test_passes_may_differ_in_mode(name, method, order):
    if method == "streaming" and family(name).latents:
        pytest.skip("positions cannot be moved")
    model, ids = shared_model(name), text(2, 20)
    logits = []
    for modes in ([torch.no_grad] * 3, [MODES[i] for i in order]):
        budget = None if method == "full" else 8
        with mp.compress(model, method, budget, page_slots=4, native_layers=False) as cache:  # gradients need torch's
            for column in range(12, 20):
                first = 0 if column == 12 else column
                with modes[column % 3]():
                    out = model(ids[:, first : column + 1], cache=cache)
                    cache.reorder_cache(torch.tensor([1, 0]))
            assert not any(t.requires_grad or t.is_inference() for pool in cache.pools for t in pool.arrays.keys)
        logits.append(out.logits.detach().clone())
    assert torch.equal(*logits)


def test_assisted_decoding_in_inference_mode():
    model = shared_model("llama")
    with mp.compress(model, "h2o", 9) as cache:
        expected = generate(model, repeating(20), 10, cache=cache)
        cache.reset()
        with torch.inference_mode():
            found = generate(model, repeating(20), 10, cache=cache, prompt_lookup_num_tokens=3)
        assert torch.equal(found, expected)
        cache.reset()
        assert torch.equal(generate(model, repeating(20), 10, cache=cache), expected)


def test_no_gradient_stays_away_silently():
    model = family("llama").make()
    with mp.compress(model, "h2o", 9) as cache:
        loss = model(**one(12), labels=one(12)["input_ids"], cache=cache).loss
        with pytest.raises(mp.UnsupportedModelError, match="gradients do not flow"):
            loss.backward()


def test_dropout():
    model = family("llama").make(attention_dropout=0.2).train()
    with mp.compress(model, "h2o", 9) as cache, pytest.raises(mp.UnsupportedModelError, match=r"drops out .*\(0.2\)"):
        model(**one(12), cache=cache)


def test_attention_weights_asked_for_by_the_config():
    model = family("llama").make(attn_implementation="eager", output_attentions=True)
    with mp.compress(model, "h2o", 9) as cache, pytest.raises(mp.OptionError, match="output_attentions"):
        model(**one(12), cache=cache)


@torch.no_grad()
def test_a_mask_that_comes_too_late():
    """Pads that went in as tokens cannot be hidden afterwards, as stock would."""
    model, prompt = shared_model("llama"), left_padded([6, 9])
    with mp.compress(model, "full") as cache:
        model(prompt["input_ids"], cache=cache)
        mask = torch.cat([prompt["attention_mask"], torch.ones(2, 1, dtype=torch.long)], 1)
        with pytest.raises(mp.CacheMismatchError, match=r"mask shows 7 tokens of sequence 0 where .* taken in 10"):
            model(text(2, 1), attention_mask=mask, cache=cache)


@torch.no_grad()
def test_a_mask_of_the_new_tokens_alone_or_none():
    model, prompt, new = shared_model("llama"), left_padded([6, 9]), text(2, 1, seed=3)
    mask = prompt["attention_mask"]
    logits = []
    for later in (torch.cat([mask, mask.new_ones(2, 1)], 1), None):
        with mp.compress(model, "h2o", 8) as cache:
            positions = (mask.cumsum(1) - 1).clamp(min=0)
            model(prompt["input_ids"], attention_mask=mask, position_ids=positions, cache=cache)
            at = torch.tensor([[6], [9]])
            logits.append(model(new, attention_mask=later, position_ids=at, cache=cache).logits)
    assert torch.equal(*logits)
