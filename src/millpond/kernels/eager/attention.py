"""Attention in plain torch, prompts and shared entries: see `ops.attend`, `ops.prefill`, `ops.window_signal`."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from millpond.kernels.args import (
    AttendArgs,
    AttendOutput,
    DecodeOutput,
    PaddedEntries,
    PrefillArgs,
    PrefillOutput,
    SharedDecodeArgs,
    WindowSignalArgs,
)
from millpond.kernels.eager.pages import read
from millpond.kernels.eager.softmax import INF, lse_merge, reduce_group, soft_cap, softmax_with_sink, wide, with_masses
from millpond.kernels.window_args import PagedWindowArgs


def empty_output(q: Tensor, value_dim: int) -> tuple[Tensor, Tensor]:
    """Return the output of queries q (S, Hq, key_dim) over no entries: out and lse."""
    out = torch.zeros((*q.shape[:2], value_dim), dtype=torch.float32, device=q.device)
    return out, torch.full(q.shape[:2], -INF, dtype=torch.float32, device=q.device)


def attend(args: AttendArgs) -> AttendOutput:
    regions = args.regions
    width = int(regions.lens.max()) if len(regions.table) else 0
    out, lse = empty_output(args.q, regions.pages.value_dim) if args.partial is None else args.partial
    attend_entries(args.q, read(regions, width), args.scale, args.softcap, args.members, (out, lse))
    return AttendOutput(out, lse)


def attend_shared(args: SharedDecodeArgs, own: DecodeOutput) -> AttendOutput:
    """Attend to shared entries and merge with the attention to own ones.

    See `ops.decode_shared`. Several runs are put together in float32.
    """
    regions = args.step.regions
    out, lse = own.out.float() if len(args.shared) > 1 else own.out.contiguous(), own.lse
    for members, shared in args.shared:
        attend(AttendArgs(args.q, shared, regions.shape.scale, regions.shape.softcap, members, (out, lse)))
    idle = (regions.q_pos < 0)[:, None]
    return AttendOutput(out.to(own.out.dtype).masked_fill_(idle[..., None], 0), lse.masked_fill_(idle, -INF))


def attend_entries(
    q: Tensor,
    entries: PaddedEntries,
    scale: float,
    softcap: float,
    members: Tensor | None,
    partial: tuple[Tensor, Tensor],
) -> None:
    """Attend from many sequences' queries to the same entries; merge with `partial`.

    Args:
        q: See `AttendArgs`.
        entries: Entries (Hkv, N, ...) that the members share.
        scale: See `AttentionShape`.
        softcap: See `AttentionShape`.
        members: See `AttendArgs`.
        partial: Output (S, Hq, value_dim) and log-sum-exp (S, Hq) over other entries; changed in place.
    """
    keys, values, positions, _, log_masses = entries
    (out, lse), at, dtype = partial, slice(None) if members is None else members, wide(q.dtype)
    some = q[at].to(dtype)
    rows = some.transpose(0, 1).reshape(len(keys), q.shape[1] // len(keys), len(some), q.shape[2])  # (Hkv, group, S, D)
    logits = soft_cap(rows @ keys.to(dtype)[:, None].transpose(-1, -2) * scale, softcap)
    logits = with_masses(logits, log_masses)
    p, shared_lse = softmax_with_sink(logits, (positions >= 0)[:, None, None], None)
    shared = (p @ values.to(dtype)[:, None]).flatten(0, 1).transpose(0, 1).float()
    merged, lse[at] = lse_merge(out[at].float(), lse[at], shared, shared_lse.flatten(0, 1).T.float())
    out[at] = merged.to(out.dtype)


#: Last queries whose logits are held at a time.
ROWS = 64


def visible_columns(q_pos: Tensor, past_pos: Tensor | None, window: int, n_kv_heads: int) -> Tensor:
    """Return (Hkv, Q, n_past + Q) bool: the columns that each query may see."""
    n = len(q_pos)
    new = q_pos.expand(n_kv_heads, n)
    past = past_pos.expand(n_kv_heads, -1) if past_pos is not None else new[:, :0]
    columns = torch.cat([past, new], 1)[:, None, :]
    rows = q_pos[None, :, None]
    visible = (columns >= 0) & (columns <= rows)
    return visible & (rows - columns < window) if window else visible


def query_weights(n: int, decay: float, like: Tensor) -> Tensor:
    """Return (n,) weights of n queries at the last one: decay**(n - 1 - i)."""
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


#: Bytes of keys and values that `window_sums` reads at a time.
READ_TOGETHER = 1 << 23


def window_sums(args: PagedWindowArgs) -> Tensor:
    sums = [window_signal(part.over(read(part.regions, args.width))) for part in args.parts(READ_TOGETHER)]
    return torch.cat(sums) if sums else args.q.new_zeros(0, args.width, dtype=torch.float32)


def _window_rows(args: WindowSignalArgs, begin: int) -> Tensor:
    """Return the attention of the queries from `begin` on, ROWS of them at most."""
    rows = slice(begin, begin + ROWS)
    part = replace(args, q=args.q[:, rows], q_pos=args.q_pos[rows], lse=None if args.lse is None else args.lse[:, rows])
    return reduce_group(window_probabilities(part), args.reduce, 1).sum(1).float()


def window_probabilities(args: WindowSignalArgs) -> Tensor:
    """Return the attention of each query of each head, (Hkv, group, w, N), float32 or wider."""
    q, k, q_pos, k_pos, shape = args.q, args.k, args.q_pos, args.k_pos, args.shape
    n_kv_heads, dtype = len(k), wide(q.dtype)
    rows = q.to(dtype).view(n_kv_heads, -1, *q.shape[1:])  # (Hkv, group, w, D)
    logits = soft_cap(rows @ k.to(dtype)[:, None].transpose(-1, -2) * shape.scale, shape.softcap)
    logits = with_masses(logits, args.log_masses)
    distance = q_pos[None, :, None] - k_pos[:, None, :]
    visible = (k_pos[:, None, :] >= 0) & (distance >= 0)
    if shape.window:
        visible &= distance < shape.window
    if args.lse is not None:
        p = torch.exp(logits - args.lse.to(dtype).view(*rows.shape[:3], 1))
        return p.masked_fill(~visible[:, None], 0.0)
    sink = shape.sink_logits.to(dtype).view(n_kv_heads, -1, 1, 1) if shape.sink_logits is not None else None
    return softmax_with_sink(logits, visible[:, None], sink)[0]


#: Rows of a matrix of cosines that are held at a time.
SCAN_ROWS = 256


def absolute_sums(x: Tensor, y: Tensor) -> Tensor:
    dtype, sets = wide(x.dtype), len(y) // max(len(x), 1)
    sums = [
        sum((own.to(dtype) @ other.to(dtype).T).abs().sum(-1) for other in y[h * sets : (h + 1) * sets])
        for h, own in enumerate(x)
    ]
    return torch.stack([torch.as_tensor(row) for row in sums]).float()


def newest_alike(keys: Tensor, lens: Tensor, threshold: float, most: int) -> tuple[Tensor, Tensor]:
    unit = torch.nn.functional.normalize(keys.to(wide(keys.dtype)), dim=-1)
    n = keys.shape[1]
    column = torch.arange(n, device=keys.device)
    exists = column < lens[:, None]
    at = torch.full((*keys.shape[:2], most), -1, dtype=torch.int32, device=keys.device)
    cosines = torch.zeros(at.shape, dtype=unit.dtype, device=keys.device)
    for begin in range(0, n, SCAN_ROWS):
        rows = slice(begin, begin + SCAN_ROWS)
        cosine = unit[:, rows] @ unit.transpose(1, 2)
        alike = (cosine > threshold) & exists[:, None] & exists[:, rows, None] & (column != column[rows, None])
        last = torch.where(alike, column, -1).topk(min(most, n), -1).values
        gathered = cosine.gather(2, last.clamp(min=0))
        at[:, rows, :n], cosines[:, rows, :n] = last.int(), torch.where(last >= 0, gathered, 0)
    return at, cosines
