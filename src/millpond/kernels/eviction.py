"""Eviction order of each `DecodeRule` in plain torch; the reference for the native kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from millpond.kernels.decode_rules import DecodeRule, Evict, Spacing

INF = float("inf")
#: Most spans of one text of which a step keeps some entries; see csrc/common/args.hpp.
MOST_LEAST = 256


def hash_priority(seed: int, head: Tensor, position: Tensor) -> Tensor:
    """A 24-bit hash of (seed, head, position) as float32: the value of `Evict.RANDOM`."""
    mask = 0xFFFFFFFF
    h = (position.long() * 0x9E3779B1 + head.long() * 0x85EBCA77 + (seed * 0xC2B2AE3D & mask)) & mask
    h = ((h ^ (h >> 16)) * 0x7FEB352D) & mask
    h = ((h ^ (h >> 15)) * 0x846CA68B) & mask
    h = h ^ (h >> 16)
    return (h >> 8).float()


def spaced_value(spacing: Spacing, positions: Tensor) -> Tensor:
    """What positions are worth in a pattern, as float32: the value of `Evict.SPACED`."""
    unit = positions.long().clamp(min=0) // spacing.width + spacing.shift
    if spacing.stride:
        return (unit % spacing.stride == 0).float()
    return torch.where(unit == 0, 2**31, unit & -unit).float()


def eviction_value(rule: DecodeRule, scores: Tensor, positions: Tensor, q_pos: Tensor, n_kv_heads: int) -> Tensor:
    """The value (R, n) by which entries leave, lowest first. q_pos: (R, 1)."""
    if rule.evict is Evict.OLDEST:
        return positions.float()
    if rule.evict is Evict.RANDOM:
        head = torch.arange(positions.shape[0], device=positions.device)[:, None] % n_kv_heads
        head = head * 0 if rule.shared else head  # all heads drop the same entry
        return hash_priority(rule.seed, head, positions)
    if rule.evict is Evict.SPACED:
        return spaced_value(rule.spacing, positions)
    value = scores / (q_pos - positions + 1).clamp(min=1) if rule.evict is Evict.ACC_MEAN else scores
    value = -value if rule.evict is Evict.HEAVIEST else value
    if rule.shared:
        value = (
            value.view(-1, n_kv_heads, value.shape[-1]).mean(1, keepdim=True).expand(-1, n_kv_heads, -1).flatten(0, 1)
        )
    return value


def in_spans(positions: Tensor, spans: Tensor) -> Tensor:
    """(R, n) bool: which positions (R, n) lie in one of the spans (R, k, 2) of their row."""
    begin, end = spans[..., None].unbind(2)
    return ((positions[:, None] >= begin) & (positions[:, None] < end)).any(1)


def in_full_spans(positions: Tensor, least: Tensor) -> Tensor:
    """(R, n) bool: which positions (R, n) lie in a span of which their row holds no more than must stay.

    least: (R, m, 3), [begin, end) and the fewest entries that stay.
    """
    begin, end, fewest = least[..., None].unbind(2)
    inside = (positions[:, None] >= begin) & (positions[:, None] < end)
    return (inside & (inside.sum(2, keepdim=True) <= fewest)).any(1)


def choose_evicted(
    rule: DecodeRule,
    scores: Tensor,
    positions: Tensor,
    q_pos: Tensor,
    recent: Tensor,
    window: int,
    n_kv_heads: int,
    kept: Tensor | None = None,
    least: Tensor | None = None,
) -> Tensor:
    """The column (R,) that leaves. Columns with position -1 are empty. Ties leave oldest first.

    kept, least: `StepRegions`.
    """
    value = eviction_value(rule, scores, positions, q_pos, n_kv_heads).double()
    protected = (positions < rule.sinks) | (q_pos - positions < recent[:, None])
    if kept is not None:
        protected |= in_spans(positions, kept.repeat_interleave(n_kv_heads, 0))
    if least is not None:
        protected |= in_full_spans(positions, least.repeat_interleave(n_kv_heads, 0))
    value = value.masked_fill(protected, INF)
    if window:
        value = value.masked_fill(q_pos + 1 - positions >= window, -INF)
    empty = positions < 0
    lowest = value.masked_fill(empty, INF).amin(1, keepdim=True)
    tied = (value == lowest) & ~empty
    return positions.masked_fill(~tied, torch.iinfo(torch.int32).max).argmin(1)
