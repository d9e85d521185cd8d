"""Assisted decoding is exact: whatever is drafted and taken back, the tokens and the cache are those without it."""

import pytest
import torch

import millpond as mp
from tests.helpers.hf.families import family, generate, left_padded, shared_model, text

ALL = [
    ("full", None, {}),
    ("h2o", 12, {}),
    ("h2o", 12, {"prefill": "greedy"}),
    ("snapkv", 12, {"window": 4}),
    ("snapkv", 12, {"window": 4, "decode": "evict"}),
    ("ada", 12, {"score": "h2o"}),
    ("tova", 9, {}),
    ("streaming", 12, {}),
    ("window", 9, {}),
    ("random", 12, {}),
]


def repeating(length: int) -> dict[str, torch.Tensor]:
    """A prompt in which a look-up finds drafts."""
    phrase = text(1, 7, seed=2)
    return {"input_ids": phrase.repeat(1, length // 7 + 1)[:, :length]}


def kept(cache: mp.MillpondCache) -> list[list[list[int]]]:
    return [cache.positions(layer) for layer in range(len(cache.layers))]


def helpers(name: str) -> dict[str, dict]:
    torch.manual_seed(1)
    stranger = family(name).make(num_hidden_layers=1, layer_types=None) if name != "llama" else family(name).make()
    with torch.no_grad():
        for weight in stranger.lm_head.parameters():
            weight += 0.02 * torch.randn_like(weight)
    return {"lookup": {"prompt_lookup_num_tokens": 4}, "model": {"assistant_model": stranger}}


@pytest.mark.covering
@pytest.mark.parametrize("helper", ["lookup", "model"])
@pytest.mark.parametrize(("method", "budget", "options"), ALL)
@pytest.mark.parametrize("name", ["llama", "gemma2", "deepseek_v3"])
def test_assisted_equals_unassisted(name, method, budget, options, helper):
    if method == "streaming" and family(name).latents:
        pytest.skip("positions cannot be moved")
    model, prompt = shared_model(name), repeating(23)
    with mp.compress(model, method, budget, page_slots=4, **options) as cache:
        expected = generate(model, prompt, 16, cache=cache)
        # the last token of each run was never fed back, so that both caches have seen the same
        seen, positions = cache.stats().seen, kept(cache)
        cache.reset()
        found = generate(model, prompt, 16, cache=cache, **helpers(name)[helper])
        cache.check_integrity()
        assert torch.equal(found, expected)
        assert cache.stats().seen == seen
        assert kept(cache) == positions


@pytest.mark.covering
@torch.no_grad()
@pytest.mark.parametrize(("method", "budget", "options"), ALL)
@pytest.mark.parametrize("taken_back", [0, 1, 3])
def test_crop_by_hand(method, budget, options, taken_back):
    """A draft of three tokens, some of them taken back, leaves what the accepted ones alone would have left."""
    model, ids = shared_model("llama"), text(1, 24)
    with mp.compress(model, method, budget, page_slots=4, **options) as cache:
        model(ids[:, :20], cache=cache)
        for column in range(20, 24 - taken_back):
            model(ids[:, column : column + 1], cache=cache)
        expected = model(ids[:, :1], cache=cache).logits
        positions = kept(cache)
        cache.reset()

        model(ids[:, :20], cache=cache)
        cache.activate_past_recording()
        model(ids[:, 20:24], cache=cache)
        cache.crop(torch.tensor(-taken_back))  # an int or, in some versions of transformers, a tensor
        cache.check_integrity()
        assert cache.get_seq_length() == 24 - taken_back
        found = model(ids[:, :1], cache=cache).logits
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
        assert kept(cache) == positions


@torch.no_grad()
def test_crop_without_a_recording():
    model, ids = shared_model("llama"), text(1, 24)
    with mp.compress(model, "full") as cache:
        model(ids, cache=cache)
        assert cache.is_croppable
        cache.crop(-4)
        found = model(ids[:, 20:21], cache=cache).logits
    torch.testing.assert_close(found, model(ids[:, :21]).logits[:, -1:], atol=1e-5, rtol=0)
    with mp.compress(model, "h2o", 10) as cache:
        model(ids, cache=cache)
        assert not cache.is_croppable
        with pytest.raises(mp.CacheMismatchError, match="activate_past_recording"):
            cache.crop(-4)
        cache.crop(0)
        with pytest.raises(mp.CacheMismatchError, match="negative"):
            cache.crop(4)


@torch.no_grad()
def test_crop_counts_tokens_not_pads():
    model, prompt = shared_model("llama"), left_padded([9, 14, 4])
    ids, mask, n = prompt["input_ids"], prompt["attention_mask"], 6
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with mp.compress(model, "full") as cache:
        model(ids, attention_mask=mask, position_ids=positions, cache=cache)
        cache.crop(-n)
        assert cache.stats().seen == [3, 8, 0]
        model(ids[:, -n:], attention_mask=mask, position_ids=positions[:, -n:], cache=cache)
        cache.crop(-1)
        found = model(ids[:, -1:], attention_mask=mask, position_ids=positions[:, -1:], cache=cache).logits
        with pytest.raises(mp.CacheMismatchError, match="has seen 14"):
            cache.crop(-15)
    expected = model(ids, attention_mask=mask, position_ids=positions).logits[:, -1:]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
