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


def eager_attention_and_values(model: Any, ids: Tensor) -> tuple[tuple[Tensor, ...], list[Tensor]]:
    """Weights as above, and the values (columns, KV heads x channels) of each layer, of the first text."""
    values: list[Tensor] = []
    hooks = [
        layer.self_attn.v_proj.register_forward_hook(lambda *a: values.append(a[2][0].detach()))
        for layer in model.model.layers
    ]
    try:
        return eager_attention(model, ids), values
    finally:
        for hook in hooks:
            hook.remove()
