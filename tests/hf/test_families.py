"""Every family equals stock transformers at a full budget, and stays inside a small one."""

from functools import cache

import pytest
import torch
from transformers import DynamicCache

import millpond as mp
from millpond.hf.model_profile import ModelProfile
from millpond.hf.signals.rotary import ModelRotation
from tests.helpers.hf.families import (
    FAMILIES,
    NAMES,
    family,
    generate,
    left_padded,
    most_stored,
    one,
    run,
    shared_model,
    tiny_llava,
    with_image,
)

STEPS = 65  # a prefill and 64 decoding steps
PROMPTS = {"single": one(21, seed=1), "padded": left_padded([19, 30, 13])}
FULL = {"full": None, "h2o": 200, "ada": 200, "streaming": 200}


@cache
def stock(name: str, prompt: str):
    return run(shared_model(name), PROMPTS[prompt], STEPS)


def moves_positions(name: str) -> bool:
    return family(name).rotary and not family(name).latents


@pytest.mark.covering
@pytest.mark.parametrize("method", FULL)
@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("name", NAMES)
def test_a_full_budget_equals_stock(name, prompt, method):
    if method == "streaming" and not moves_positions(name):
        pytest.skip("positions cannot be moved: see test_streaming_needs_rotary_positions")
    expected = stock(name, prompt)
    with mp.compress(shared_model(name), method, FULL[method], page_slots=16) as cache:
        found = run(shared_model(name), PROMPTS[prompt], STEPS, cache=cache)
        cache.check_integrity()
    assert torch.equal(found.ids, expected.ids)
    torch.testing.assert_close(found.logits, expected.logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", [n for n in NAMES if not moves_positions(n)])
def test_streaming_needs_rotary_positions(name):
    with pytest.raises(mp.UnsupportedModelError, match="positions cannot be moved"):
        mp.compress(shared_model(name), "streaming", 20)
    with mp.compress(shared_model(name), "streaming", 20, positions="absolute") as cache:
        generate(shared_model(name), PROMPTS["padded"], 4, cache=cache)
        assert most_stored(cache) == 20


@pytest.mark.in_turns(1, of=3)
@pytest.mark.parametrize("name", NAMES)
def test_a_small_budget_holds_at_every_step(name):
    model, budget, most = shared_model(name), 8, []

    def watch(ids, scores):
        most.append(most_stored(cache))
        return scores

    with mp.compress(model, "h2o", budget, page_slots=4) as cache:
        generate(model, PROMPTS["padded"], 12, cache=cache, logits_processor=[watch])
        cache.check_integrity()
        held = cache.stats()
    assert most == [budget] * 12
    pages = 2 * len(held.stored) * 3 * 4  # of 4 slots: at most 2 per KV head; 3 sequences; at most 4 KV heads
    assert held.kv_bytes <= pages * max(pool.kv_bytes_per_page for pool in cache.pools)
    assert held.evicted > 0


@pytest.mark.parametrize("name", [n for n in NAMES if moves_positions(n)])
def test_rotation_is_the_models_own(name):
    """Keys of the first layer depend on the token and its position alone: rotate them, and look them up."""
    layers = {"layer_types": ["full_attention"] * 3} if family(name).windows and name != "mistral" else {}
    model = family(name).make(sliding_window=None, **layers) if name == "mistral" else family(name).make(**layers)
    ids = one(9)["input_ids"]
    here = torch.arange(9)[None]
    keys = {}
    for shift in (0, 11):
        stored = DynamicCache(config=model.config)
        with torch.no_grad():
            model(input_ids=ids, position_ids=here + shift, cache=stored)
        keys[shift] = stored.layers[0].keys
    rotary = ModelRotation.of(ModelProfile.of(model))
    moved = rotary.rotate(rotary.rotate(keys[0], here, inverse=True), here + 11)
    torch.testing.assert_close(moved, keys[11], atol=1e-4, rtol=1e-4)
    assert not torch.allclose(keys[0], keys[11], atol=1e-2)


@pytest.mark.parametrize("name", [f.name for f in FAMILIES if f.windows])
def test_sliding_layers_keep_no_more_than_their_window(name):
    model = shared_model(name)
    with mp.compress(model, "full", page_slots=4) as cache:
        generate(model, PROMPTS["padded"], 5, cache=cache)
        held = [max(max(s) for s in layer) for layer in cache.stats().stored]
    window = model.config.sliding_window
    kinds = getattr(model.config, "layer_types", None) or ["sliding_attention"] * len(held)
    assert held == [window if kind == "sliding_attention" else 30 + 4 for kind in kinds]


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_any_way_to_load_and_run(name, mode, implementation):
    if implementation == "sdpa" and name in ("gemma2", "gpt_oss"):
        pytest.skip("stock does not support it")
    model, prompt = family(name).make(attn_implementation=implementation), PROMPTS["padded"]
    position_ids = (prompt["attention_mask"].cumsum(1) - 1).clamp(min=0)
    with mode():
        expected = model(**prompt, position_ids=position_ids).logits
        with mp.compress(model, "h2o", 12) as cache:
            found = model(**prompt, position_ids=position_ids, cache=cache).logits
    real = prompt["attention_mask"].bool()
    torch.testing.assert_close(found[real], expected[real], atol=1e-5, rtol=0)
    assert model.config._attn_implementation == implementation


@pytest.mark.parametrize("method", ["full", "h2o", "ada", "streaming"])
def test_llava(method):
    model, prompt = tiny_llava(), with_image(one(20), at=5)
    expected = run(model, prompt, 20)
    with mp.compress(model, method, FULL[method]) as cache:
        found = run(model, prompt, 20, cache=cache)
        assert model.config.vision_config._attn_implementation == "sdpa"
    assert torch.equal(found.ids, expected.ids)
    torch.testing.assert_close(found.logits, expected.logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize("method", ["h2o", "streaming"])
def test_llava_in_a_small_budget(method):
    model = tiny_llava()
    with mp.compress(model, method, 10) as cache:
        generate(model, with_image(one(20), at=5), 30, cache=cache)
        assert most_stored(cache) == 10
