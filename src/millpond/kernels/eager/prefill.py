"""Attention of a prompt in plain torch, a matrix at once: see `ops.prefill` and `ops.window_signal`."""

from __future__ import annotations

import torch
from torch import Tensor

from millpond.kernels.args import PrefillArgs, PrefillOutput, WindowSignalArgs
from millpond.kernels.eager.softmax import reduce_group, soft_cap, softmax_with_sink, wide, with_masses

#: Last queries whose logits are held at a time.
ROWS = 64


def visible_columns(q_pos: Tensor, past_pos: Tensor | None, window: int, n_kv_heads: int) -> Tensor:
    """(Hkv, Q, n_past + Q) bool: what each query may see."""
    n = len(q_pos)
    new = q_pos.expand(n_kv_heads, n)
    past = past_pos.expand(n_kv_heads, -1) if past_pos is not None else new[:, :0]
    columns = torch.cat([past, new], 1)[:, None, :]
    rows = q_pos[None, :, None]
    visible = (columns >= 0) & (columns <= rows)
    return visible & (rows - columns < window) if window else visible


def query_weights(n: int, decay: float, like: Tensor) -> Tensor:
    """(n,) what the attention of each of n queries still counts for at the last one: decay**(n - 1 - i)."""
    later = torch.arange(n - 1, -1, -1, dtype=like.dtype, device=like.device)
    return torch.pow(decay, later)


def prefill(args: PrefillArgs) -> PrefillOutput:
    q, k, v, shape = args.q, args.k, args.v, args.shape
    n_heads, n_kv_heads = q.shape[0], k.shape[0]
    dtype = wide(q.dtype)
    rows = q.to(dtype).reshape(n_kv_heads, n_heads // n_kv_heads, *q.shape[1:])  # (Hkv, group, Q, D)
    logits = soft_cap(rows @ k.to(dtype)[:, None].transpose(-1, -2) * shape.scale, shape.softcap)
    logits = with_masses(logits, args.past_log_masses)
    visible = visible_columns(args.q_pos, args.past_pos, shape.window, n_kv_heads)
    sink = shape.sink_logits.to(dtype).view(n_kv_heads, -1, 1, 1) if shape.sink_logits is not None else None
    p, lse = softmax_with_sink(logits, visible[:, None], sink)
    out = (p @ v.to(dtype)[:, None]).reshape(n_heads, q.shape[1], -1).to(q.dtype)
    sums = None
    if args.colsum is not None:
        sums = (reduce_group(p, args.colsum, 1) * query_weights(q.shape[1], args.decay, p)[:, None]).sum(1).float()
    return PrefillOutput(out, lse.reshape(n_heads, -1).float(), sums)


def window_signal(args: WindowSignalArgs) -> Tensor:
    parts = [_window_rows(args, begin) for begin in range(0, args.q.shape[1], ROWS)]
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)


def _window_rows(args: WindowSignalArgs, begin: int) -> Tensor:
    """What the queries from `begin` on give, ROWS of them at most."""
    own = slice(begin, begin + ROWS)
    q, k, q_pos, k_pos, shape = args.q[:, own], args.k, args.q_pos[own], args.k_pos, args.shape
    n_kv_heads, dtype = len(k), wide(args.q.dtype)
    rows = q.to(dtype).view(n_kv_heads, -1, *q.shape[1:])  # (Hkv, group, w, D)
    logits = soft_cap(rows @ k.to(dtype)[:, None].transpose(-1, -2) * shape.scale, shape.softcap)
    logits = with_masses(logits, args.log_masses)
    distance = q_pos[None, :, None] - k_pos[:, None, :]
    visible = (k_pos[:, None, :] >= 0) & (distance >= 0)
    if shape.window:
        visible &= distance < shape.window
    if args.lse is not None:
        p = torch.exp(logits - args.lse[:, own].to(dtype).view(*rows.shape[:3], 1)).masked_fill(~visible[:, None], 0.0)
    else:
        sink = shape.sink_logits.to(dtype).view(n_kv_heads, -1, 1, 1) if shape.sink_logits is not None else None
        p, _ = softmax_with_sink(logits, visible[:, None], sink)
    return reduce_group(p, args.reduce, 1).sum(1).float()
