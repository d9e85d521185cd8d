"""Tiny models of many kinds for the codec `transform`, texts for them, and their transforms."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    StableLmConfig,
    StableLmForCausalLM,
)

from millpond.codec.transform.transform_file import ModelTransform
from millpond.hf.calibration.transform import calibrate_transform

SIZE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "attn_implementation": "sdpa",
}
KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "gqa": (LlamaConfig, LlamaForCausalLM, {}),
    "mqa": (LlamaConfig, LlamaForCausalLM, {"num_key_value_heads": 1}),
    "yarn": (
        LlamaConfig,
        LlamaForCausalLM,
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 256,
            }
        },
    ),
    "biases": (Qwen2Config, Qwen2ForCausalLM, {}),
    "norms": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 8}),
    "wide": (LlamaConfig, LlamaForCausalLM, {"head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 1}),
    "partial": (StableLmConfig, StableLmForCausalLM, {"partial_rotary_factor": 0.5}),
    "sliding": (
        Gemma3TextConfig,
        Gemma3ForCausalLM,
        {"head_dim": 8, "sliding_window": 200, "layer_types": ["sliding_attention", "full_attention"]},
    ),
}


@cache
def tiny(kind: str) -> Any:
    """A random model whose attention is sharp; one with biases has large ones, a sink and massive channels."""
    torch.manual_seed(0)
    config, model_class, own = KINDS[kind]
    model = model_class(config(**{**SIZE, **own})).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            attention = layer.self_attn
            for name, factor in (("q_proj", 8), ("k_proj", 8), ("v_proj", 6), ("o_proj", 6)):
                getattr(attention, name).weight *= factor
            if kind == "biases":
                attention.k_proj.bias += torch.zeros_like(attention.k_proj.bias).index_fill(0, torch.tensor([3, 9]), 60)
                attention.k_proj.bias += torch.randn(attention.k_proj.bias.shape)
                model.model.embed_tokens.weight[1, 5] = 40.0  # the first token of a text, a sink
    return model


def ids(n: int, seed: int = 0) -> Tensor:
    """A text (n,) of words that come again, behind the first token."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(2, 96, (24, 5), generator=generator)
    text = words[torch.randint(0, 24, (n // 5 + 1,), generator=generator)].flatten()[:n]
    text[0] = 1
    return text


@cache
def transform_of_tiny(kind: str) -> ModelTransform:
    return calibrate_transform(tiny(kind), [ids(512, seed) for seed in range(1, 5)], length=512)
