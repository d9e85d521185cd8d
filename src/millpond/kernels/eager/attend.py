"""Attention over shared entries in plain torch: see `ops.attend`."""

from __future__ import annotations

import torch
from torch import Tensor

from millpond.kernels.args import AttendArgs, AttendOutput
from millpond.kernels.eager.pages import read
from millpond.kernels.eager.softmax import INF, lse_merge, soft_cap, softmax_with_sink, wide, with_masses


def nothing_found(q: Tensor, value_dim: int) -> tuple[Tensor, Tensor]:
    """What queries q (S, Hq, key_dim) find where there are no entries: out and lse as `attend` returns them."""
    out = torch.zeros((*q.shape[:2], value_dim), dtype=torch.float32, device=q.device)
    return out, torch.full(q.shape[:2], -INF, dtype=torch.float32, device=q.device)


def attend(args: AttendArgs) -> AttendOutput:
    q, regions, chosen = args.q, args.regions, slice(None) if args.members is None else args.members
    n_kv_heads, dtype = len(regions.table), wide(q.dtype)
    width = int(regions.lens.max()) if n_kv_heads else 0
    keys, values, positions, _, log_masses = read(regions, width)
    some = q[chosen].to(dtype)
    rows = some.transpose(0, 1).reshape(n_kv_heads, -1, len(some), q.shape[2])  # (Hkv, group, S, D)
    logits = soft_cap(rows @ keys.to(dtype)[:, None].transpose(-1, -2) * args.scale, args.softcap)
    logits = with_masses(logits, log_masses)
    p, shared_lse = softmax_with_sink(logits, (positions >= 0)[:, None, None], None)
    shared = (p @ values.to(dtype)[:, None]).flatten(0, 1).transpose(0, 1).float()
    out, lse = nothing_found(q, regions.pages.value_dim) if args.found is None else args.found
    before, whole = out[chosen].float(), shared_lse.flatten(0, 1).T.float()
    merged, lse[chosen] = lse_merge(before, lse[chosen], shared, whole)
    out[chosen] = merged.to(out.dtype)
    return AttendOutput(out, lse)
