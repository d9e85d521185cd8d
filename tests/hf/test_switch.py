"""Switching a model's attention and back: stock caches go on as ever, and nothing stays behind."""

import gc

import pytest
import torch
from transformers import DynamicCache

import millpond as mp
from tests.helpers.hf.families import (
    NAMES,
    family,
    generate,
    left_padded,
    one,
    run,
    shared_model,
    teacher_forced,
    text,
    tiny_llava,
)


@pytest.mark.in_turns(0, of=3)
@pytest.mark.parametrize("name", NAMES)
def test_a_stock_cache_on_a_switched_model(name):
    model, prompt, more = shared_model(name), left_padded([19, 26, 13]), text(3, 5, seed=6)
    expected = teacher_forced(model, prompt, more, DynamicCache(config=model.config))
    tokens, chunked = generate(model, prompt, 6), generate(model, prompt, 6, prefill_chunk_size=7)
    plain = run(model, prompt, 1, use_cache=False).logits
    with mp.compress(model, "h2o", 8, attach=False):
        found = teacher_forced(model, prompt, more, DynamicCache(config=model.config))
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
        assert torch.equal(generate(model, prompt, 6), tokens)
        assert torch.equal(generate(model, prompt, 6, prefill_chunk_size=7), chunked)
        torch.testing.assert_close(run(model, prompt, 1, use_cache=False).logits, plain, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_training_on_a_switched_model(name):
    model, prompt = family(name).make(), one(14)
    grads = []
    for switched in (False, True):
        model.zero_grad()
        caches = [mp.compress(model, "h2o", 8)] if switched else []
        model(**prompt, labels=prompt["input_ids"], use_cache=False).loss.backward()
        grads.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        for cache in caches:
            cache.close()
    for mine, stock in zip(*grads, strict=True):
        torch.testing.assert_close(mine, stock, atol=1e-5, rtol=1e-4)


def test_figures_behind_the_block_are_those_of_its_end():
    model = shared_model("llama")
    with mp.compress(model, "h2o", 8) as cache:
        generate(model, one(12), 3, cache=cache)
        at_end = cache.stats()
    assert at_end.seen == [14]
    assert at_end.kv_bytes > 0
    assert sum(pool.nbytes for pool in cache.pools) == 0
    assert cache.stats() == at_end
    cache.close()
    assert cache.stats() == at_end


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_with_gives_the_attention_back(implementation):
    model = family("llama").make(attn_implementation=implementation)
    hooks = len(model._forward_pre_hooks), len(model.model._forward_hooks)
    with mp.compress(model, "h2o", 8) as cache:
        assert model.config._attn_implementation == "millpond"
        generate(model, one(12), 3, cache=cache)
    assert model.config._attn_implementation == implementation
    assert (len(model._forward_pre_hooks), len(model.model._forward_hooks)) == hooks
    assert sum(pool.nbytes for pool in cache.pools) == 0
    cache.close()
    assert model.config._attn_implementation == implementation
    with pytest.raises(mp.CacheMismatchError, match="closed"):
        model(**one(12), cache=cache)


@pytest.mark.parametrize("first_closed", [0, 1])
def test_two_caches_on_one_model(first_closed):
    model, prompts = family("llama").make(), [one(15, seed=1), left_padded([11, 18], seed=2)]
    alone = []
    for prompt in prompts:
        with mp.compress(model, "h2o", 8) as cache:
            alone.append(generate(model, prompt, 8, cache=cache))
    caches = [mp.compress(model, "h2o", 8), mp.compress(model, "h2o", 8)]
    for prompt, cache, expected in zip(prompts, caches, alone, strict=True):
        assert torch.equal(generate(model, prompt, 8, cache=cache), expected)
    caches[first_closed].close()
    assert model.config._attn_implementation == "millpond"
    left = 1 - first_closed
    caches[left].reset()
    assert torch.equal(generate(model, prompts[left], 8, cache=caches[left]), alone[left])
    caches[left].close()
    assert model.config._attn_implementation == "sdpa"


def test_an_exception_gives_the_attention_back():
    model = family("llama").make()

    def fail(ids, scores):
        raise KeyError("in the middle")

    with pytest.raises(KeyError, match="in the middle"), mp.compress(model, "h2o", 8) as cache:
        generate(model, one(12), 3, cache=cache, logits_processor=[fail])
    assert model.config._attn_implementation == "sdpa"
    expected = generate(shared_model("llama"), one(12), 6)
    assert torch.equal(generate(model, one(12), 6), expected)


def test_a_pass_that_was_broken_off_leaves_no_trace():
    """An error between update() and attention must not lead the next model's keys into this cache."""
    model, other = family("llama").make(), family("llama").make()

    def fail(module, args, output):
        raise KeyError("in the middle")

    cache = mp.compress(model, "h2o", 8)
    other_cache = mp.compress(other, "h2o", 8)
    hook = model.model.layers[1].self_attn.v_proj.register_forward_hook(fail)
    with pytest.raises(KeyError):
        model(**one(12), cache=cache)
    hook.remove()
    found = generate(other, one(12), 6)
    assert torch.equal(found, generate(shared_model("llama"), one(12), 6))
    with pytest.raises(mp.CacheMismatchError, match="interrupted"):
        model(**one(12), cache=cache)
    cache.reset()
    assert torch.equal(generate(model, one(12), 6, cache=cache)[:, :13], found[:, :13])
    cache.close()
    other_cache.close()


def test_a_forgotten_cache_gives_the_attention_back():
    model = family("llama").make()
    cache = mp.compress(model, "streaming", 8)
    generate(model, one(12), 3, cache=cache)
    del cache
    gc.collect()
    assert model.config._attn_implementation == "sdpa"
    assert not model._forward_pre_hooks


def test_only_the_language_side_is_switched():
    model = tiny_llava()
    with mp.compress(model, "h2o", 8):
        assert model.config.text_config._attn_implementation == "millpond"
        assert model.config.vision_config._attn_implementation == "sdpa"
        assert model.config._attn_implementation == "sdpa"
    assert model.config.text_config._attn_implementation == "sdpa"
