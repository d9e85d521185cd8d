"""Attention of queries at scattered positions, in plain torch: each sees the entries at positions up to its own."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from millpond.kernels.args import AttentionShape
from millpond.kernels.eager.softmax import soft_cap, softmax_with_sink, wide

#: Logits of one block of queries: few enough to stay in the cache of a core.
BLOCK_LOGITS = 1 << 21


def attend_scattered(q: Tensor, k: Tensor, v: Tensor, q_pos: Tensor, k_pos: Tensor, shape: AttentionShape) -> Tensor:
    """(Hq, R, value_dim) in the dtype of the queries.

    Args:
        q: (Hq, R, key_dim) at positions q_pos (R,). k: (Hkv, N, key_dim), v: (Hkv, N, value_dim), at positions k_pos
            (Hkv or 1, N), -1 for none; both in any order.
    """
    out = [
        (p @ v.to(p.dtype)[:, None]).flatten(0, 1).to(q.dtype) for p in _probabilities(q, k, q_pos, k_pos, shape)
    ]  # fmt: skip
    return torch.cat(out, 1) if out else q.new_empty(len(q), 0, v.shape[-1])


def attention_to_parts(
    q: Tensor, k: Tensor, q_pos: Tensor, k_pos: Tensor, shape: AttentionShape, parts: Tensor, n_parts: int
) -> Tensor:
    """(R, n_parts) float32: the attention of each query to each part, the mean over the heads.

    Args:
        parts: (N,) int64, the part of each key, `n_parts` for keys that count for none. The rest: as of
            `attend_scattered`.
    """
    sums = [p.mean((0, 1)) for p in _probabilities(q, k, q_pos, k_pos, shape)]
    found = torch.cat(sums).float() if sums else q.new_zeros(0, k.shape[1], dtype=torch.float32)
    out = torch.zeros(len(found), n_parts + 1, dtype=torch.float32, device=q.device)
    return out.index_add_(1, parts, found)[:, :n_parts]


def _probabilities(q: Tensor, k: Tensor, q_pos: Tensor, k_pos: Tensor, shape: AttentionShape) -> Iterator[Tensor]:
    """(Hkv, group, rows, N) of blocks of queries, one after another."""
    n_kv_heads, dtype = len(k), wide(q.dtype)
    rows = q.to(dtype).reshape(n_kv_heads, len(q) // n_kv_heads, *q.shape[1:])
    keys = k.to(dtype)[:, None].transpose(-1, -2)
    sink = shape.sink_logits.to(dtype).view(n_kv_heads, -1, 1, 1) if shape.sink_logits is not None else None
    block = max(16, BLOCK_LOGITS // max(len(q) * k.shape[1], 1))
    for begin in range(0, q.shape[1], block):
        logits = soft_cap(rows[:, :, begin : begin + block] @ keys * shape.scale, shape.softcap)
        distance = q_pos[None, begin : begin + block, None] - k_pos[:, None, :]
        visible = (k_pos[:, None, :] >= 0) & (distance >= 0)
        if shape.window:
            visible &= distance < shape.window
        yield softmax_with_sink(logits, visible[:, None], sink)[0]
