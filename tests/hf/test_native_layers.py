"""Passing decoder layers in a few native calls: the same tokens, only where nobody looks inside, and back again."""

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import millpond as mp
from millpond.hf.native_layers import decoder_layers
from millpond.hf.native_layers.decoder_layers import use_lean_layers
from millpond.kernels import native
from millpond.kernels.linear import FEW_ROWS
from tests.helpers.hf.families import NAMES, family, generate, left_padded, one, shared_model
from tests.helpers.hf.switches import (
    copied_and_pickled,
    gives_back_after_the_last_of_two_users,
    gives_back_when_the_cache_is_forgotten,
)

pytestmark = pytest.mark.skipif(not native.is_available(), reason="installed without native kernels")
LIKE_LLAMA = {"llama", "mistral", "qwen2", "qwen3"}


@pytest.fixture
def passes(monkeypatch):
    """How often a layer was passed natively, trials aside."""
    seen, real = [], decoder_layers._run

    def run(parts, x, mask, cache, embeddings):
        if cache is not None:
            seen.append(parts)
        return real(parts, x, mask, cache, embeddings)

    monkeypatch.setattr(decoder_layers, "_run", run)
    return seen


def switched(model):
    return [m for m in model.modules() if "forward" in m.__dict__]


@pytest.mark.in_turns(2, of=3)
@pytest.mark.parametrize("name", NAMES)
def test_tokens_equal_stock(name, passes):
    model, prompt = shared_model(name), left_padded([19, 26, 13])
    expected = generate(model, prompt, 8)
    undo = use_lean_layers(model)
    assert bool(switched(model)) == (name in LIKE_LLAMA)
    assert torch.equal(generate(model, prompt, 8), expected)  # with a stock cache
    with mp.compress(model, "full") as cache:
        assert torch.equal(generate(model, prompt, 8, cache=cache), expected)
    assert bool(passes) == (name in LIKE_LLAMA)
    undo()
    assert not switched(model)


@pytest.mark.parametrize("name", sorted(LIKE_LLAMA))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_agree_with_those_of_transformers(name, dtype):
    model = family(name).make(attention_bias=name == "llama", hidden_act="gelu" if name == "mistral" else "silu")
    model = model.to(dtype)
    ids = one(20)["input_ids"]
    with torch.no_grad():
        found = []
        for native_layers in (False, True):
            with mp.compress(model, "full", native_layers=native_layers) as cache:
                model(ids[:, :12], cache=cache)
                assert bool(switched(model)) == native_layers
                found.append(torch.cat([model(ids[:, i : i + 1], cache=cache).logits for i in range(12, 20)]))
    error = (found[0] - found[1]).abs().max() / found[0].abs().max()
    assert error < (1e-5 if dtype == torch.float32 else 0.03)


def test_whoever_looks_inside_sees_what_happens(passes):
    model, ids = family("llama").make(), one(6)["input_ids"]
    undo = use_lean_layers(model)
    seen = []
    with torch.no_grad():
        model(ids)
        assert len(passes) == 2
        hook = model.model.layers[0].mlp.register_forward_hook(lambda *args: seen.append(args))
        model(ids)
        assert len(seen) == 1
        assert len(passes) == 3
        hook.remove()
        out = model(ids, output_attentions=True, output_hidden_states=True)
    assert all(a.shape == (1, 4, 6, 6) for a in out.attentions)
    assert len(out.hidden_states) == 3
    undo()


def test_gradients_training_and_long_passes_take_the_layers_own(passes):
    model = family("llama").make()
    undo = use_lean_layers(model)
    model(**one(6), labels=one(6)["input_ids"]).loss.backward()
    assert model.model.layers[0].mlp.up_proj.weight.grad is not None
    with torch.no_grad():
        model(**one(FEW_ROWS + 1))
        model.train()
        model(**one(6))
        model.eval()
        model.double()
        model(**one(6))
    assert not passes
    undo()


def test_new_weights_count(passes):
    model, ids = family("llama").make(), one(6)["input_ids"]
    undo = use_lean_layers(model)
    with torch.no_grad():
        before = model(ids).logits
        for layer in model.model.layers:
            layer.mlp.up_proj.weight = nn.Parameter(torch.zeros_like(layer.mlp.up_proj.weight))
            layer.self_attn.v_proj.weight.data = layer.self_attn.v_proj.weight.data.clone()  # moved
        passes.clear()
        found = model(ids).logits
        assert len(passes) == 2
        undo()
        torch.testing.assert_close(found, model(ids).logits)
    assert not torch.allclose(found, before)


class Scaled(LlamaDecoderLayer):
    """Built like Llama's layer, computes something else."""

    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs) * 1.5


def test_a_layer_that_computes_something_else_is_left_alone():
    model = family("llama").make()
    model.model.layers[1].__class__ = Scaled
    undo = use_lean_layers(model)
    assert switched(model) == [model.model.layers[0]]
    undo()


def test_a_forward_of_its_own_is_left_alone():
    model = family("llama").make()
    model.model.layers[0].mlp.up_proj.forward = lambda x: x
    model.model.layers[1].forward = lambda *args, **kwargs: args[0]
    before = switched(model)
    undo = use_lean_layers(model)
    assert switched(model) == before
    undo()
    assert switched(model) == before


def test_two_users_of_one_model():
    model = family("llama").make()
    gives_back_after_the_last_of_two_users(model, use_lean_layers, switched, list(model.model.layers))


def test_a_forgotten_cache_gives_them_back():
    gives_back_when_the_cache_is_forgotten(family("llama").make(), switched)


def test_copies_and_pickles_of_a_switched_model():
    model, ids = family("llama").make(), one(6)["input_ids"]
    undo = use_lean_layers(model)
    twin, loaded = copied_and_pickled(model)
    undo()
    with torch.no_grad():
        nn.init.zeros_(twin.lm_head.weight)
        assert not twin(ids).logits.any()
        torch.testing.assert_close(loaded(ids).logits, model(ids).logits)
