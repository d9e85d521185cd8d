"""A few tokens behind a cache: passes have the bits of decoding one by one, so that drafts change no logit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import millpond as mp
from millpond.kernels.native import library
from millpond.models.load import load_model, load_tokenizer
from tests.helpers.hf.families import family, text
from tests.helpers.models import REAL, needs_real_model

pytestmark = pytest.mark.skipif(not library.runnable(), reason="installed without native kernels")


def model_of(name: str, dtype: torch.dtype) -> torch.nn.Module:
    """Wide enough that its linear layers are native."""
    return family(name).make(hidden_size=256, intermediate_size=1024, vocab_size=2048).to(dtype)


def assert_same_logits(model, prompt: torch.Tensor, n_new: int, **options) -> None:
    """Each logit of assisted generation is that of plain decoding, bit by bit."""
    settings = {
        "max_new_tokens": n_new,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_logits": True,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    ones = torch.ones_like(prompt)
    with mp.compress(model, "full") as cache:
        plain = model.generate(prompt, attention_mask=ones, cache=cache, **settings)
        cache.reset()
        passes: list[int] = []

        def note(module, args, given) -> None:
            passes.append(given["input_ids"].shape[1])

        handle = model.register_forward_pre_hook(note, with_kwargs=True)
        drafted = model.generate(prompt, attention_mask=ones, cache=cache, **settings, **options)
        handle.remove()
    assert passes[0] == prompt.shape[1], "the prompt comes alone"
    assert any(n > 2 for n in passes[1:]), "nothing was drafted"
    assert torch.equal(drafted.sequences, plain.sequences)
    assert len(drafted.logits) == len(plain.logits)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(drafted.logits, plain.logits, strict=True))


@pytest.mark.covering
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("helper", ["lookup", "model"])
def test_assisted_logits_are_those_of_plain_decoding(helper: str, dtype: torch.dtype) -> None:
    model = model_of("llama", dtype)
    prompt = text(1, 7, seed=2).repeat(1, 9)
    helpers = {"lookup": {"prompt_lookup_num_tokens": 4}, "model": {"assistant_model": model_of("llama", dtype)}}
    assert_same_logits(model, prompt, 100, **helpers[helper])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch", [1, 4])
@torch.no_grad()
def test_a_pass_of_five_has_the_bits_of_five_steps(batch: int, dtype: torch.dtype) -> None:
    model, ids = model_of("llama", dtype), text(batch, 75)
    with mp.compress(model, "full", page_slots=4) as cache:
        model(ids[:, :70], cache=cache)
        expected = torch.cat([model(ids[:, i : i + 1], cache=cache).logits for i in range(70, 75)], 1)
        positions = [cache.positions(layer) for layer in range(len(cache.layers))]
        cache.reset()
        model(ids[:, :70], cache=cache)
        for layer in cache.layer_caches:
            layer._prompt_pass = layer._prompt = None  # neither reads a prompt
        found = model(ids[:, 70:], cache=cache).logits
        assert torch.equal(found, expected)
        assert [cache.positions(layer) for layer in range(len(cache.layers))] == positions


@needs_real_model
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_a_real_model(dtype: str) -> None:
    assert REAL is not None
    model, tokenizer = load_model(REAL, dtype), load_tokenizer(REAL)
    prompt = tokenizer(Path(__file__).read_text(), return_tensors="pt").input_ids[:, :1000]
    assert_same_logits(model, prompt, 100, prompt_lookup_num_tokens=5)
