"""`ops.merge_slots` in plain torch, the reference for other implementations."""

from __future__ import annotations

import torch
from torch import Tensor

from millpond.kernels.args import EntryRows, MergeArgs
from millpond.kernels.decode_rules import DecodeRule
from millpond.kernels.eager.pages import read, write
from millpond.kernels.eager.softmax import INF
from millpond.kernels.eviction import eviction_value
from millpond.kernels.merge import merge_reference
from millpond.kernels.merge.links import rows
from millpond.kernels.merge.rules import Weigh


def merge_slots(args: MergeArgs) -> None:
    regions, leave, rule, memory = args.regions, args.leave, args.rule, args.memory
    pages, lens, caps = regions.pages, regions.lens, args.caps
    width = int(lens.max()) if len(lens) else 0
    n_kv_heads = len(lens) // max(len(args.q_pos), 1)
    q_pos = args.q_pos.repeat_interleave(n_kv_heads)[:, None]
    spare = torch.where(q_pos[:, 0] >= 0, (lens - caps).clamp(min=0), 0)
    if not bool(spare.any()):
        return
    keys, values, positions, scores, log_masses = read(regions, width)
    order = torch.where(positions < 0, torch.iinfo(torch.int32).max, positions).argsort(dim=1)
    keys, values = rows(keys, order), rows(values, order)
    positions, scores = positions.gather(1, order), scores.gather(1, order)
    masses = torch.ones(scores.shape, dtype=torch.float64, device=scores.device)
    if rule.masses and log_masses is not None:
        masses = log_masses.gather(1, order).double().exp()
    local = None if args.local is None else args.local[:, :width].gather(1, order)
    value = leaving_value(leave, scores, positions, q_pos, n_kv_heads, local)
    there = positions >= 0
    pinned = (positions < leave.sinks) | (q_pos - positions < args.recent[:, None])
    weakest = value.double().masked_fill(pinned, INF).masked_fill(~there, INF)
    first = weakest.sort(dim=1, stable=True).indices  # ties: the oldest leaves
    rank = torch.empty_like(first).scatter_(1, first, torch.arange(width, device=first.device).expand_as(first))
    keep = there & (rank >= spare[:, None])
    given = value
    if rule.weigh is Weigh.CHANCE:
        given = scores / (q_pos - positions + 1).clamp(min=1) if rule.average else scores
    entries = merge_reference.MergeColumns(keys, values, positions, scores, masses)
    due = spare > 0
    joined = merge_reference.merge(rule, entries, keep, given, memory, leave.seed)
    memory.copy_(joined.memory)
    front = torch.where(keep, 0, 1).sort(dim=1, stable=True).indices.int()
    count = torch.where(due, keep.sum(1), 0).int()
    masses_out = (joined.log_masses if rule.masses else None) if pages.masses else None
    stay = EntryRows(
        torch.zeros_like(count), count, front, joined.keys, joined.values, positions, joined.scores, masses_out
    )
    write(regions, stay)
    lens.copy_(torch.where(due, count, lens))


def leaving_value(
    leave: DecodeRule, scores: Tensor, positions: Tensor, q_pos: Tensor, n_kv_heads: int, local: Tensor | None
) -> Tensor:
    """(R, n): the value by which entries leave, lowest first. q_pos: (R, 1)."""
    if local is None:
        return eviction_value(leave, scores, positions, q_pos, n_kv_heads)
    return blend(scores.masked_fill(positions < 0, 0), local.masked_fill(positions < 0, 0))


def blend(overall: Tensor, local: Tensor) -> Tensor:
    """max(overall, local * sum(overall) / sum(local)) along each row of (R, N)."""
    factor = overall.double().sum(1, keepdim=True) / local.double().sum(1, keepdim=True)
    return torch.maximum(overall, (local * factor).float())
