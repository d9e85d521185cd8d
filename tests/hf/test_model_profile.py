"""A model is read as it is at that moment, and nothing that outlives the reading holds it."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
from torch import nn
from transformers import PreTrainedModel

import millpond as mp
from millpond.errors import UnsupportedModelError
from millpond.hf.model_profile import FULL, LatentShape, ModelProfile
from tests.helpers.hf.families import FAMILIES, WINDOW, family


@pytest.mark.parametrize("name", [f.name for f in FAMILIES])
def test_what_is_read_of_every_family(name: str) -> None:
    model = family(name).make()
    profile = ModelProfile.of(model)
    assert profile.name == type(model).__name__
    assert profile.config is model.config
    assert profile.n_layers == len(profile.windows) == len(profile.layer_types) == model.config.num_hidden_layers
    assert profile.n_heads == model.config.num_attention_heads
    assert profile.modules[0] is model
    assert profile.modules[-1] in list(model.base_model.modules())[:2]  # OPT's lies one deeper
    assert (profile.rotary is not None) == family(name).rotary
    assert (profile.latent is not None) == family(name).latents
    assert any(profile.windows) == profile.sliding == family(name).windows
    assert set(profile.output_projections) == set(range(profile.n_layers))
    assert profile.vocabulary == model.config.vocab_size
    assert profile.begin_tokens == (1,)
    assert not profile.image_ids
    assert not profile.takes_images


def test_layers_of_two_kinds() -> None:
    profile = ModelProfile.of(family("gemma2").make())
    assert profile.windows == (WINDOW, 0, WINDOW)
    assert profile.layer_types[1] == FULL


def test_shared_keys_that_transformers_does_not_name() -> None:
    model = family("llama").make()
    model.config.num_kv_shared_layers = 1  # as Gemma 3n before transformers 5.23
    with pytest.raises(UnsupportedModelError, match=r"read the keys of others.*upgrade it to 5\.23"):
        ModelProfile.of(model)


def test_latents() -> None:
    assert ModelProfile.of(family("deepseek_v3").make()).latent == LatentShape(12, 4)


def test_the_end_of_a_text_is_first_what_generate_uses() -> None:
    model: Any = family("llama").make()
    assert ModelProfile.of(model).end_tokens == frozenset()
    model.config.eos_token_id = 5
    assert ModelProfile.of(model).end_tokens == {5}
    model.generation_config.eos_token_id = [3, 4]
    assert ModelProfile.of(model).end_tokens == {3, 4}


def test_what_has_changed_is_read_anew() -> None:
    """Configurations and modules change in place: an earlier reading is not taken for the model."""
    model: Any = family("mistral").make()
    assert ModelProfile.of(model).windows == (WINDOW, WINDOW)
    model.config.sliding_window = None
    assert ModelProfile.of(model).windows == (0, 0)
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    assert ModelProfile.of(model).rotary is model.model.rotary_emb
    model.model.layers[1].self_attn.o_proj = nn.Linear(32, 32)
    place = ModelProfile.of(model).output_projections[1]
    assert getattr(*place) is model.model.layers[1].self_attn.o_proj


@pytest.mark.filterwarnings("ignore::millpond.hf.generation.UnusedCacheWarning")
def test_a_fork_follows_what_was_replaced_before_it() -> None:
    """The family of a cache reads its model again for each of its caches."""
    model: Any = family("llama").make()
    cache = mp.compress(model, "h2o", 8)
    layer = model.model.layers[0]
    layer.self_attn = type(layer.self_attn)(model.config, 0).to(model.dtype)
    other = cache.fork()
    outputs = other.layer_caches[0].attention.outputs
    assert outputs is not None
    assert outputs().data_ptr() == layer.self_attn.o_proj.weight.data_ptr()
    other.close()
    cache.close()


@pytest.mark.filterwarnings("ignore::millpond.hf.generation.UnusedCacheWarning")
def test_a_model_that_is_forgotten_is_collected_whatever_was_read() -> None:
    model: PreTrainedModel | None = family("llama").make()
    assert model is not None
    cache, gone = mp.compress(model, "h2o", 8), weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    cache.close()
