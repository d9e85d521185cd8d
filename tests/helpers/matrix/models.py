"""Tiny random Llamas of the matrix, and inputs for them."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

HEADS = {"mha": (2, 2), "gqa": (8, 2)}


@lru_cache(maxsize=8)
def llama(heads: str = "gqa", dtype: torch.dtype = torch.float64, layers: int = 2) -> LlamaForCausalLM:
    """A random Llama with sharpened attention, so that scores differ."""
    torch.manual_seed(0)
    n_heads, n_kv_heads = HEADS[heads]
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=n_heads,
        num_key_value_heads=n_kv_heads,
        head_dim=8,
        max_position_embeddings=512,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config).to(dtype).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight *= 12
            layer.self_attn.k_proj.weight *= 12
            layer.self_attn.v_proj.weight *= 8
            layer.self_attn.o_proj.weight *= 8
    return model


def prompts(batch: int, length: int = 40, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Ids and mask (batch, length); with more than one sequence they differ in length and are padded on the left."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, 96, (batch, length), generator=generator)
    mask = torch.ones_like(ids)
    for b in range(1, batch):
        mask[b, : 7 * b] = 0
        ids[b, : 7 * b] = 0
    return ids, mask
