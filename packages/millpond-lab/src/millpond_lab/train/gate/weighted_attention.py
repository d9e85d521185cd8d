"""Attention of later tokens to a prompt whose entries have weights, with gradients to the weights."""

from __future__ import annotations

import torch
from torch import Tensor

from millpond.kernels.args import AttentionShape

#: Denominators below it count as it: where nothing that is kept has any weight next to what was dropped.
LEAST_SUM = 1e-30


def weighted_attention(
    q: Tensor, k: Tensor, v: Tensor, prompt_keys: Tensor, prompt_values: Tensor, weights: Tensor, shape: AttentionShape
) -> Tensor:
    """Softmax whose terms of the prompt are multiplied by weights: a_ij = e^s_ij w_j / sum_j' e^s_ij' w_j'.

    A weight of 0 hides an entry, and its gradient says what the entry would have added. Later tokens see one another.

    Args:
        q: (query heads, m, key_dim), k: (KV heads, m, key_dim), v: (KV heads, m, value_dim), of the later tokens.
        prompt_keys, prompt_values: (KV heads, n, ...). weights: (KV heads, n) of the prompt's entries.
        shape: what attention does besides softmax(q k / sqrt d).

    Returns:
        (query heads, m, value_dim) in the dtype of `weights`.
    """
    n_kv_heads, n = weights.shape
    n_heads, m, _ = q.shape
    logits, seen = _logits(q, torch.cat([prompt_keys, k.to(prompt_keys)], 1), n, shape)
    most = logits.detach().amax(-1, keepdim=True)
    if shape.sink_logits is not None:
        sinks = shape.sink_logits.to(logits).view(n_kv_heads, -1, 1, 1)
        most = most.maximum(sinks)
    terms = (logits - most).exp() * seen
    ones = weights.new_ones(n_kv_heads, m)
    terms = terms * torch.cat([weights, ones], 1)[:, None, None]
    total = terms.sum(-1, keepdim=True)
    if shape.sink_logits is not None:
        total = total + (sinks - most).exp()
    values = torch.cat([prompt_values, v.to(prompt_values)], 1)[:, None]
    out: Tensor = terms @ values / total.clamp(min=LEAST_SUM)
    return out.reshape(n_heads, m, -1)


def _logits(q: Tensor, keys: Tensor, n: int, shape: AttentionShape) -> tuple[Tensor, Tensor]:
    """(KV heads, group, m, n + m) float logits, least where nothing is seen; and (m, n + m) bool, what is seen."""
    n_kv_heads, m = len(keys), q.shape[1]
    grouped = q.to(keys).view(n_kv_heads, -1, m, q.shape[-1])
    logits = grouped @ keys.transpose(1, 2)[:, None] * shape.scale
    if shape.softcap:
        logits = shape.softcap * torch.tanh(logits / shape.softcap)
    places = torch.arange(n + m, device=q.device)
    seen = places <= places[n:, None]
    if shape.window:
        seen &= places[n:, None] - places < shape.window
    return logits.masked_fill(~seen, torch.finfo(logits.dtype).min), seen
