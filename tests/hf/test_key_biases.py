"""Key projections with large biases: scales for formats that make up for them, and who is warned."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import millpond as mp
from millpond.codec import codec_named, list_codecs
from millpond.codec.presets import PRESETS as CODECS
from millpond.hf.key_biases import KeyBiasWarning, key_biases, largest_key_bias, loses_by_bias
from millpond.models.cache_argument import cache_argument
from tests.helpers.hf.families import family, left_padded, run

PAPERS = ["rotated4_paper", "flexgen4_paper"]


def biased(size: float, **options: Any) -> Any:
    """A small Qwen2 whose keys have biases of this size."""
    torch.manual_seed(0)
    wide = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = family("qwen2").make(**wide, **options)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.bias.normal_().mul_(size / layer.self_attn.k_proj.bias.abs().max())
    return model


def scales(cache: mp.MillpondCache) -> list[float | None]:
    """The largest scale of the keys of each layer that has read something."""
    found = []
    for layer_cache in cache.layer_caches:
        assert layer_cache.table is not None
        basis = layer_cache.table.basis
        found.append(None if basis is None or basis.scales is None else float(basis.scales.max()))
    return found


def test_the_largest_bias_is_found() -> None:
    assert largest_key_bias(biased(50.0)) == pytest.approx(50.0, rel=1e-4)
    assert largest_key_bias(family("llama").make()) == 0.0
    assert key_biases(family("llama").make()) == [None, None]


def test_formats_with_one_scale_per_token_lose() -> None:
    losing = {name for name in CODECS if loses_by_bias(codec_named(name))}
    tiers = {f"{upper}mikv{bits}" for upper in ("", "int8_") for bits in ("", "3", "4")}
    assert losing == {"rotated4_paper", "rotated3_paper", "rotated2_paper", "flexgen4_paper", *tiers}
    assert losing < set(list_codecs())


@pytest.mark.parametrize("codec", PAPERS)
def test_who_names_such_a_format_is_told(codec: str) -> None:
    with pytest.warns(KeyBiasWarning, match=rf"codec '{codec}'.*biases of up to 50"):
        mp.compress(biased(50.0), "full", codec=codec).close()
    with pytest.warns(KeyBiasWarning), mp.LLM(biased(50.0), method="full", codec=codec):
        pass
    with warnings.catch_warnings():
        warnings.simplefilter("error", KeyBiasWarning)
        mp.compress(biased(0.5), "full", codec=codec).close()
        mp.compress(biased(50.0), "full", codec="int4").close()
        mp.compress(biased(50.0), preset="balanced").close()


@pytest.mark.parametrize(("size", "scale"), [(50.0, 8.0), (0.5, None)])
@pytest.mark.parametrize("codec", ["rotated4", "0=int8,*=rotated4"])
def test_keys_with_large_biases_are_divided(size: float, scale: float | None, codec: str) -> None:
    model, ids = biased(size), torch.arange(3, 90)[None]
    with mp.compress(model, "full", codec=codec) as cache, torch.no_grad():
        model(ids, **cache_argument(cache))
        found = scales(cache)
        assert found[-1] == scale
        assert found[0] == (scale if codec == "rotated4" else None)
        exact = mp.compress(model, "full", codec="bf16")
        with exact:
            model(ids, **cache_argument(exact))
            keys, expected = cache.layer_caches[1].read(0).keys, exact.layer_caches[1].read(0).keys
            assert float((keys - expected).norm() / expected.norm()) < 0.1, "`read` gives keys as the model made them"


def test_the_engine_answers_as_generate_does() -> None:
    model, prompt = biased(60.0), left_padded([90])
    with mp.compress(model, "full", codec="rotated4") as cache:
        ids = run(model, prompt, 12, cache=cache).ids[0, 90:]
    with mp.LLM(model, method="full", codec="rotated4") as llm:
        params = mp.SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
        (output,) = llm.generate([prompt["input_ids"][0].tolist()], params)
        assert list(output.completions[0].token_ids) == ids.tolist()


def test_narrow_heads_take_plain_numbers_by_default() -> None:
    model = family("llama").make(hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    with mp.compress(model) as cache:
        assert cache.settings is not None
        assert (cache.settings["method"], cache.settings["codec"]) == ("full", "auto")
    with mp.LLM(model) as llm:
        assert llm.engine.cache.codec == "auto"


@pytest.mark.parametrize(("codec", "means"), [("rotated4", True), ("rotated4_paper", False), ("int4", False)])
def test_what_outlives_the_process_is_not_taken_for_pages_of_the_former_layout(codec: str, means: bool) -> None:
    """Sessions and requests on their way are found by these words, which the same name had without means."""
    with mp.LLM(biased(0.5), method="full", codec=codec) as llm:
        assert ("less means" in llm.engine.cache_factory.described) == means
