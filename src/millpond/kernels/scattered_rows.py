"""Attention of queries at scattered positions: each sees the entries at positions up to its own.

Where entries lie in the order of their positions, a few queries at a time meet all entries before the first of them and
their own in the kernel of prompts; the entries between them are few, and are met in plain torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from millpond.kernels import ops
from millpond.kernels.args import AttentionShape, PrefillArgs
from millpond.kernels.eager.softmax import lse_merge, soft_cap, softmax_with_sink, wide

#: Logits of one block of queries in plain torch: few enough to stay in the cache of a core.
BLOCK_LOGITS = 1 << 21
#: Queries that meet the entries before them together. More of them have more entries between them.
BLOCK_ROWS = 32


def attend_scattered(q: Tensor, k: Tensor, v: Tensor, q_pos: Tensor, k_pos: Tensor, shape: AttentionShape) -> Tensor:
    """Return (Hq, R, value_dim) in the dtype of the queries.

    Args:
        q: (Hq, R, key_dim).
        k: (Hkv, N, key_dim), in any order.
        v: (Hkv, N, value_dim).
        q_pos: (R,) int32, ascending positions of the queries.
        k_pos: (Hkv or 1, N) int32, positions of the entries, -1 for none.
        shape: Settings of the attention.
    """
    if not q.shape[1]:
        return q.new_empty(len(q), 0, v.shape[-1])
    if bool((k_pos == torch.arange(k.shape[1], dtype=k_pos.dtype, device=k.device)).all()):
        places = q_pos.tolist()
        return torch.cat([_in_order(q, k, v, q_pos, begin, end, shape) for begin, end in _blocks(places)], 1)
    outputs = (p @ v.to(p.dtype)[:, None] for p, _ in _probabilities(q, k, q_pos, k_pos, shape))
    return torch.cat([out.flatten(0, 1).to(q.dtype) for out in outputs], 1)


def attend_part(
    q: Tensor, k: Tensor, v: Tensor, q_pos: Tensor, k_pos: Tensor, shape: AttentionShape
) -> tuple[Tensor, Tensor]:
    """Return attention to some of the entries.

    `lse_merge` merges it with that to the others.

    Args:
        q: (Hq, R, key_dim), R above 0.
        k: (Hkv, N, key_dim), in any order.
        v: (Hkv, N, value_dim).
        q_pos: (R,) int32, ascending positions of the queries.
        k_pos: (Hkv or 1, N) int32, positions of the entries, -1 for none.
        shape: Settings of the attention; a sink is counted once, in one of the parts.

    Returns:
        (Hq, R, value_dim) in float32 or wider, and its log-sum-exp (Hq, R).
    """
    columns = [
        ((p @ v.to(p.dtype)[:, None]).flatten(0, 1), lse.flatten(0, 1))
        for p, lse in _probabilities(q, k, q_pos, k_pos, shape)
    ]
    out, lse = (torch.cat(part, 1) for part in zip(*columns, strict=True))
    return out, lse


def attention_to_parts(
    q: Tensor, k: Tensor, q_pos: Tensor, k_pos: Tensor, shape: AttentionShape, parts: Tensor, n_parts: int
) -> Tensor:
    """Return (R, n_parts) float32: attention of each query to each part, mean over heads.

    Of each head the sums are in the dtype of the queries.

    Args:
        q: (Hq, R, key_dim).
        k: (Hkv, N, key_dim), in any order.
        q_pos: (R,) int32, ascending positions of the queries.
        k_pos: (Hkv or 1, N) int32, positions of the entries, -1 for none.
        shape: Settings of the attention.
        parts: (N,) int64, the part of each key, `n_parts` for keys that count for none.
        n_parts: Number of parts.
    """
    found = q.new_zeros(q.shape[1], n_parts, dtype=torch.float32)
    width = k.shape[-1]
    # attention over values that say which part an entry is of; as wide as keys, which every kernel takes
    for first in range(0, n_parts if q.shape[1] else 0, width):
        values = (parts[:, None] == torch.arange(first, first + width, device=parts.device)).to(k.dtype)
        values = values[None].expand(len(k), -1, -1).contiguous()
        shares = attend_scattered(q, k, values, q_pos, k_pos, shape).float().mean(0)
        found[:, first : first + width] = shares[:, : n_parts - first]
    return found


def _blocks(places: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield (begin, end) of the queries to attend together: long runs, and a few of others."""
    runs: list[list[int]] = []
    for number, place in enumerate(places):
        if runs and places[number - 1] == place - 1:
            runs[-1][1] = number + 1
        else:
            runs.append([number, number + 1])
    begin = 0
    for first, last in runs:
        if last - first >= BLOCK_ROWS or last - begin > BLOCK_ROWS:
            if first > begin:
                yield begin, first
            begin = first
        if last - first >= BLOCK_ROWS:
            yield first, last
            begin = last
    if begin < len(places):
        yield begin, len(places)


def _in_order(q: Tensor, k: Tensor, v: Tensor, q_pos: Tensor, begin: int, end: int, shape: AttentionShape) -> Tensor:
    """Run `attend_scattered` for queries begin..end, where the n-th entry is at position n."""
    rows, positions = q[:, begin:end], q_pos[begin:end]
    first, last, n = int(positions[0]), int(positions[-1]), end - begin
    past = torch.arange(first, dtype=positions.dtype, device=positions.device)[None] if first else None
    if last - first + 1 == n:
        return ops.prefill(PrefillArgs(rows, k[:, : last + 1], v[:, : last + 1], positions, shape, past)).out
    index = positions.long()
    keys, values = (torch.cat([t[:, :first], t[:, index]], 1) for t in (k, v))
    out, lse, _ = ops.prefill(PrefillArgs(rows, keys, values, positions, shape, past))
    between = torch.ones(last - first, dtype=torch.bool, device=positions.device)
    between[index[:-1] - first] = False
    gaps = torch.nonzero(between).flatten() + first
    without_sink = replace(shape, sink_logits=None)  # which the first part has counted
    more, more_lse = attend_part(rows, k[:, gaps], v[:, gaps], positions, gaps[None].to(positions.dtype), without_sink)
    return lse_merge(out, lse, more, more_lse)[0]


def _probabilities(
    q: Tensor, k: Tensor, q_pos: Tensor, k_pos: Tensor, shape: AttentionShape
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (Hkv, group, rows, N) and log-sum-exp (Hkv, group, rows), by blocks of queries."""
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
        yield softmax_with_sink(logits, visible[:, None], sink)
