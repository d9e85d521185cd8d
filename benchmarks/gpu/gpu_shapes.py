"""Random models of the shapes that the GPU benchmarks run: an 8B Llama, OPTs of 6.7B and 30B, or small ones of them."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, OPTConfig


def llama_8b(tiny: bool) -> LlamaConfig:
    """32 layers of width 4,096, 32 query and 8 KV heads of 128, gated layers of 14,336 (Llama 3 8B)."""
    config: Any = LlamaConfig
    return config(  # type: ignore[no-any-return]
        vocab_size=512 if tiny else 128_256,
        hidden_size=64 if tiny else 4096,
        intermediate_size=128 if tiny else 14_336,
        num_hidden_layers=2 if tiny else 32,
        num_attention_heads=4 if tiny else 32,
        num_key_value_heads=2 if tiny else 8,
        max_position_embeddings=65_536,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
    )


def opt_6_7b(tiny: bool) -> OPTConfig:
    """32 layers of width 4,096, 32 heads of 128 with keys and values of their own, layers of 16,384 (OPT-6.7B)."""
    return _opt(tiny, width=4096, layers=32, heads=32)


def opt_30b(tiny: bool) -> OPTConfig:
    """48 layers of width 7,168, 56 heads of 128 with keys and values of their own, layers of 28,672 (OPT-30B)."""
    return _opt(tiny, width=7168, layers=48, heads=56)


def _opt(tiny: bool, width: int, layers: int, heads: int) -> OPTConfig:
    """An OPT whose positions are more than the published 2,048, as longer texts need them."""
    width, layers, heads = (64, 4, 4) if tiny else (width, layers, heads)
    config: Any = OPTConfig
    return config(  # type: ignore[no-any-return]
        vocab_size=512 if tiny else 50_272,
        hidden_size=width,
        ffn_dim=4 * width,
        word_embed_proj_dim=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        max_position_embeddings=8448,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
    )


def empty_model(config: Any) -> Any:
    """A model without weights: their names and shapes."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def parameter_bytes(config: Any) -> int:
    """Bytes of all weights in bf16."""
    return sum(2 * weight.numel() for weight in empty_model(config).parameters())


def kv_token_bytes(config: Any) -> int:
    """Bytes of a token's keys and values in bf16 where each head has its own."""
    return int(2 * 2 * config.num_hidden_layers * config.hidden_size)


def random_model(config: Any, device: torch.device) -> Any:
    """A model with random weights in bf16, drawn on the device."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    finally:
        torch.set_default_dtype(before)
    return model.train(False)
