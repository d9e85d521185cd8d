"""Types of models that gave wrong tokens or crashed: each works, or `compress` says why it does not."""

from typing import Any

import pytest
import torch

import millpond as mp
from millpond.hf.attention import attention, begin_pass, break_off, tag
from millpond.runner.packed_model import PackedModel
from millpond_lab.bench.model_types.tiny_model import tiny_model
from tests.helpers.hf.families import COMMON, build, generate, one, run

#: type -> configuration, model, settings beside the common ones.
WORK: dict[str, tuple[str, str, dict[str, Any]]] = {
    "afmoe": (
        "AfmoeConfig",
        "AfmoeForCausalLM",
        {
            "head_dim": 8,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "num_dense_layers": 1,
            "sliding_window": 12,
        },
    ),
    "jetmoe": ("JetMoeConfig", "JetMoeForCausalLM", {"kv_channels": 8, "num_local_experts": 4}),
    "gemma4_text": (
        "Gemma4TextConfig",
        "Gemma4ForCausalLM",
        {
            "head_dim": 8,
            "global_head_dim": 8,
            "hidden_size_per_layer_input": 8,
            "sliding_window": 12,
            "vocab_size_per_layer_input": 96,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "phimoe": (  # whose window is in its mask alone
        "PhimoeConfig",
        "PhimoeForCausalLM",
        {"sliding_window": 12, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "beam": (
        "BeamConfig",
        "BeamForCausalLM",
        {
            "head_dim": 8,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "n_group": 1,
            "topk_group": 1,
            "sliding_window": 12,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
}
REFUSED = {
    "diffllama": ("DiffLlamaConfig", "DiffLlamaForCausalLM", {}, "attends to the keys of each layer twice"),
    "doge": ("DogeConfig", "DogeForCausalLM", {}, "masks attention by the values of all tokens"),
}


@pytest.mark.covering
@pytest.mark.parametrize("method", ["full", "h2o", "streaming", "expected_attention"])
@pytest.mark.parametrize("kind", WORK)
def test_equals_stock(kind, method):
    config, name, settings = WORK[kind]
    model = build(config, name, **(COMMON | settings))
    if method == "streaming" and kind == "beam":
        with pytest.raises(mp.UnsupportedModelError, match="does not rotate its layers of type full_attention"):
            mp.compress(model, method, 64)
        return
    expected = run(model, one(21), 12)
    with mp.compress(model, method, None if method == "full" else 64) as cache:
        found = run(model, one(21), 12, cache=cache)
    assert torch.equal(found.ids, expected.ids)
    torch.testing.assert_close(found.logits, expected.logits, atol=2e-5, rtol=1e-5)
    if method != "full":
        with mp.compress(model, method, 12) as cache:
            generate(model, one(21), 6, cache=cache)
            cache.check_integrity()


@pytest.mark.parametrize("kind", REFUSED)
def test_is_refused_before_it_runs(kind):
    config, name, settings, why = REFUSED[kind]
    model = build(config, name, **(COMMON | settings))
    with pytest.raises(mp.UnsupportedModelError, match=why):
        mp.compress(model, "full")


def test_layers_without_heads_are_refused():
    with pytest.raises(mp.UnsupportedModelError, match="names no num_attention_heads"):
        mp.compress(tiny_model("xlstm"), "full")


def test_a_window_that_only_another_cache_keeps_to_is_refused():
    """Moshi sees what its cache hands it."""
    model = tiny_model("moshi")
    with mp.compress(model, "full") as cache, pytest.raises(mp.UnsupportedModelError, match="sliding window of 12 tok"):
        generate(model, one(15), 6, cache=cache)
    with pytest.raises(mp.UnsupportedModelError, match="sliding window of 12 tok"):
        PackedModel(model)


def test_blocks_of_pictures_over_a_text_without_are_no_reason():
    """Gemma 3's processor names the type of every token, where all are of text, too."""
    model, prompt = tiny_model("gemma3"), one(21)
    prompt["token_type_ids"] = torch.zeros_like(prompt["input_ids"])
    expected = run(model, prompt, 6)
    with mp.compress(model, "full") as cache:
        found = run(model, prompt, 6, cache=cache)
    torch.testing.assert_close(found.logits, expected.logits, atol=2e-5, rtol=1e-5)
    prompt["token_type_ids"][:, 3:8] = 1
    with mp.compress(model, "full") as cache, pytest.raises(mp.UnsupportedModelError, match="not causal"):
        generate(model, prompt, 6, cache=cache)


def test_what_an_outer_model_lays_over_its_mask_is_seen_inside():
    """PaliGemma hands the mask of its prefix, which sees ahead, to a Gemma; a text without one is as any other."""
    model, prompt = tiny_model("paligemma"), one(15)
    suffix = prompt | {"token_type_ids": torch.ones_like(prompt["input_ids"])}
    expected = run(model, suffix, 6)
    for inputs in (prompt, suffix):
        with mp.compress(model, "full") as cache:
            found = run(model, inputs, 6, cache=cache)
        torch.testing.assert_close(found.logits, expected.logits, atol=2e-5, rtol=1e-5)
    prefix = prompt | {"token_type_ids": torch.zeros_like(prompt["input_ids"])}
    assert not torch.equal(generate(model, prefix, 6), expected.ids)
    with mp.compress(model, "full") as cache, pytest.raises(mp.UnsupportedModelError, match="not causal"):
        generate(model, prefix, 6, cache=cache)


def test_keys_that_are_attended_to_twice_are_refused():
    """Whatever the type: the second attention would add the tokens a second time."""

    class Layer:
        index = 0

        def attend(self, q, k, v, mask, shape):
            return q

    begin_pass()
    try:
        x = torch.ones(1, 2, 3, 4)
        key = tag(x, Layer())
        attention(torch.nn.Identity(), x, key, x, None)
        with pytest.raises(mp.UnsupportedModelError, match="keys of layer 0 a second time"):
            attention(torch.nn.Identity(), x, key, x, None)
    finally:
        break_off()


def test_heads_of_several_sizes_are_left_to_the_model():
    """Values of other sizes than keys: the native pass would write beyond its buffers."""
    model = build(
        "MiMoV2FlashConfig",
        "MiMoV2FlashForCausalLM",
        **(
            COMMON
            | {
                "head_dim": 8,
                "v_head_dim": 6,
                "swa_head_dim": 8,
                "swa_v_head_dim": 6,
                "n_routed_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 16,
                "sliding_window": 12,
                "attn_implementation": "eager",
            }
        ),
    )
    expected = generate(model, one(15), 6)
    with mp.compress(model, "full") as cache:
        assert torch.equal(generate(model, one(15), 6, cache=cache), expected)
