"""Op set in plain torch, prompts in blocks of query rows.

Attention and the exact column sums of a prompt are made in one pass, without a (Q, N) matrix. It runs where neither the
native kernels nor those of the GPU can: every dtype and device that torch has. Extra memory: Hq * block * N numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from millpond.kernels.args import PrefillArgs, PrefillOutput
from millpond.kernels.decode_rules import Reduce
from millpond.kernels.eager.attention import query_weights
from millpond.kernels.eager.softmax import INF, reduce_group, wide
from millpond.kernels.reference import (
    absolute_sums,
    admit,
    attend,
    best_columns,
    block_sums,
    decode,
    decode_rows,
    decode_shared,
    merge_slots,
    move_entries,
    newest_alike,
    read,
    read_packed,
    read_scores,
    shared_counts,
    window_signal,
    window_sums,
    write,
    write_packed,
)


def block_rows(group: int) -> int:
    """Return the query rows per block.

    They are few, so that little is computed above the diagonal and the logits stay in the cache. 64 rows of a group of
    4 took 0.76 of the time of 256 rows (4k queries, D=128, bf16, 2 cores of a Zen 5, products in oneDNN); with one
    query head per KV head the matrix products want 128.
    """
    return max(64, min(128, 256 // group))


def _block_mask(
    q_pos: Tensor, past_pos: Tensor | None, n_past: int, begin: int, end: int, window: int
) -> Tensor | None:
    """Return hidden columns (Hkv or 1, rows, n_past + end) of rows begin..end, or None."""
    rows = q_pos[begin:end, None]
    new = q_pos[None, :end]
    hidden_new = (new > rows) | (rows - new >= window) if window else new > rows
    if n_past == 0 or past_pos is None:
        return hidden_new[None]
    past = past_pos[:, None, :]
    hidden_past = (past < 0) | (rows - past >= window) if window else past < 0
    hidden_past = hidden_past.expand(-1, end - begin, -1)
    return torch.cat([hidden_past, hidden_new[None].expand(hidden_past.shape[0], -1, -1)], -1)


def _logits(rows: Tensor, keys: Tensor, scale: float, softcap: float, past_log_masses: Tensor | None) -> Tensor:
    """Return (Hkv, group, rows, n) logits in the wide dtype.

    Rows are (Hkv, group, rows, D), keys (Hkv, n, D).
    """
    n_kv_heads, group, n_rows, dim = rows.shape
    product = torch.bmm(rows.reshape(n_kv_heads, group * n_rows, dim), keys.transpose(1, 2))
    logits = product.to(wide(rows.dtype)).mul_(scale)
    if softcap:
        logits.div_(softcap).tanh_().mul_(softcap)
    logits = logits.view(n_kv_heads, group, n_rows, -1)
    if past_log_masses is not None:
        logits[..., : past_log_masses.shape[-1]] += past_log_masses[:, None, None]
    return logits


def prefill(args: PrefillArgs) -> PrefillOutput:
    q, shape, colsum = args.q, args.shape, args.colsum
    n_heads, n_rows, _ = q.shape
    n_kv_heads, n_columns, _ = args.k.shape
    group, n_past = n_heads // n_kv_heads, n_columns - n_rows
    dtype = wide(q.dtype)
    k, v = args.k.to(q.dtype), args.v.to(q.dtype)
    rows = q.reshape(n_kv_heads, group, n_rows, -1)
    out = q.new_empty(n_kv_heads, group, n_rows, v.shape[-1])
    lse = torch.empty(n_kv_heads, group, n_rows, dtype=dtype, device=q.device)
    sums = torch.zeros(n_kv_heads, n_columns, dtype=dtype, device=q.device) if colsum is not None else None
    weights = query_weights(n_rows, args.decay, lse) if args.decay != 1 else None
    sink = shape.sink_logits.to(dtype).view(n_kv_heads, group, 1, 1) if shape.sink_logits is not None else None
    block = block_rows(group)
    for begin in range(0, n_rows, block):
        end = min(begin + block, n_rows)
        seen = n_past + end
        p = _logits(rows[:, :, begin:end], k[:, :seen], shape.scale, shape.softcap, args.past_log_masses)
        hidden = _block_mask(args.q_pos, args.past_pos, n_past, begin, end, shape.window)
        if hidden is not None:
            p.masked_fill_(hidden[:, None], -INF)
        top = p.amax(-1, keepdim=True)
        top = torch.maximum(top, sink) if sink is not None else top
        total = p.sub_(top).exp_().sum(-1, keepdim=True)
        total = total + torch.exp(sink - top) if sink is not None else total
        p.div_(total)
        lse[:, :, begin:end] = (top + total.log())[..., 0]
        if sums is not None and colsum is not None:
            counted = p if weights is None else p * weights[begin:end, None]
            sums[:, :seen] += _column_sums(counted, colsum)
        flat = p.to(q.dtype).view(n_kv_heads, -1, seen)
        out[:, :, begin:end] = torch.bmm(flat, v[:, :seen]).view(n_kv_heads, group, end - begin, -1)
    heads = (n_heads, n_rows)
    return PrefillOutput(out.view(*heads, -1), lse.view(heads).float(), sums.float() if sums is not None else None)


def _column_sums(p: Tensor, how: Reduce) -> Tensor:
    """Return (Hkv, n) from (Hkv, group, rows, n)."""
    if how is Reduce.MAX:
        return reduce_group(p, how, 1).sum(1)
    sums = p.sum((1, 2))
    return sums / p.shape[1] if how is Reduce.MEAN else sums
