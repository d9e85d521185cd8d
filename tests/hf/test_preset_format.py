"""Number formats of presets: what narrow heads store, and keys with large biases."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import millpond as mp
from millpond.codec import codec_named, list_codecs
from millpond.codec.presets import PRESETS as CODECS
from millpond.hf.preset_format import KeyBiasWarning, largest_key_bias, loses_by_bias, suited
from millpond.models.cache_argument import cache_argument
from tests.helpers.hf.families import family


def biased(size: float) -> Any:
    """A small Qwen2 whose keys have biases of this size."""
    torch.manual_seed(0)
    model = family("qwen2").make(hidden_size=64, num_attention_heads=2, num_key_value_heads=1)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.bias.normal_().mul_(size / layer.self_attn.k_proj.bias.abs().max())
    return model


def test_the_largest_bias_is_found() -> None:
    assert largest_key_bias(biased(50.0)) == pytest.approx(50.0, rel=1e-4)
    assert largest_key_bias(family("llama").make()) == 0.0


def test_formats_with_one_scale_per_token_lose() -> None:
    losing = {name for name in CODECS if loses_by_bias(codec_named(name))}
    assert losing == {"rotated4", "rotated3", "rotated2", "flexgen4", "mikv"}
    assert losing < set(list_codecs())


@pytest.mark.parametrize(("size", "codec"), [(50.0, "int4"), (0.5, "rotated4")])
def test_a_preset_takes_a_scale_per_channel_where_biases_are_large(size: float, codec: str) -> None:
    model = biased(size)
    assert suited("rotated4", model) == codec
    assert suited("int8", model) == "int8"
    with warnings.catch_warnings():
        warnings.simplefilter("error", KeyBiasWarning)
        with mp.compress(model, preset="balanced") as cache:
            assert cache.settings is not None
            assert cache.settings["codec"] == codec
        with mp.LLM(model, preset="balanced") as llm:
            assert llm.engine.cache.codec == codec
    with mp.LLM(model) as llm:
        assert llm.engine._recipes.complete(mp.CacheOptions(preset="balanced")).codec == codec


@pytest.mark.parametrize("codec", ["rotated4", "flexgen4"])
def test_who_names_such_a_format_is_told(codec: str) -> None:
    with pytest.warns(KeyBiasWarning, match=rf"codec '{codec}'.*biases of up to 50"):
        mp.compress(biased(50.0), "full", codec=codec).close()
    with pytest.warns(KeyBiasWarning), mp.LLM(biased(50.0), method="full", codec=codec):
        pass
    with warnings.catch_warnings():
        warnings.simplefilter("error", KeyBiasWarning)
        mp.compress(biased(0.5), "full", codec=codec).close()
        mp.compress(biased(50.0), "full", codec="int4").close()


def test_what_is_told_is_so() -> None:
    """Where biases are large the first choice is another one with a scale per token, and the same per channel."""
    model, ids = biased(200.0), torch.randint(3, 50, (1, 300), generator=torch.Generator().manual_seed(0))
    found = {}
    for codec in ("bf16", "rotated4", "int4"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", KeyBiasWarning)
            with mp.compress(model, "full", codec=codec) as cache, torch.no_grad():
                model(ids[:, :-1], **cache_argument(cache))
                logits = model(ids[:, -1:], **cache_argument(cache)).logits[0, -1].float()
                found[codec] = logits.log_softmax(-1)
    far = {name: float((found["bf16"].exp() * (found["bf16"] - found[name])).sum()) for name in ("rotated4", "int4")}
    assert far["int4"] < far["rotated4"] / 4


def test_narrow_heads_take_plain_numbers_by_default() -> None:
    model = family("llama").make(hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    with mp.compress(model) as cache:
        assert cache.settings is not None
        assert (cache.settings["method"], cache.settings["codec"]) == ("full", "auto")
    with mp.LLM(model) as llm:
        assert llm.engine.cache.codec == "auto"
