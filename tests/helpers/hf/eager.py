"""Attention weights of transformers' own eager attention."""

from typing import Any

import torch
from torch import Tensor


def eager_attention(model: Any, ids: Tensor) -> tuple[Tensor, ...]:
    """Weights (batch, heads, queries, columns) of each layer. The model keeps the attention it had."""
    before = model.config._attn_implementation
    try:
        model.set_attn_implementation("eager")
        with torch.no_grad():
            weights: tuple[Tensor, ...] = model(ids, output_attentions=True).attentions
    finally:
        model.set_attn_implementation(before)
    return weights
