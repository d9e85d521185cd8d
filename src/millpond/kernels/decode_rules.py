"""Accumulation and eviction rules of a decoding step as plain numbers for kernels, with their order in plain torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor


class Signal(IntEnum):
    """Attention that the decode kernel writes into the score accumulator of each stored entry."""

    NONE = 0  #: nothing: the accumulator is not read or written
    SUM = 1  #: acc <- decay * acc + p
    LAST = 2  #: acc <- p, the attention of the newest query alone


class Reduce(IntEnum):
    """Reduction of the attention of a GQA group to one number p per entry of the KV head."""

    MEAN = 0
    MAX = 1
    SUM = 2


class Evict(IntEnum):
    """Order in which unprotected entries leave a full region.

    The lowest value goes; ties go to the oldest.
    """

    NEVER = 0  #: the region grows
    ACC = 1  #: the accumulator
    ACC_MEAN = 2  #: the accumulator over the number of queries that saw the entry, acc / (query_pos - pos + 1)
    OLDEST = 3  #: the position
    RANDOM = 4  #: a hash of (seed, region head, position): a uniform sample that no batch or order changes
    HEAVIEST = 5  #: the accumulator turned round: the highest goes
    SPACED = 6  #: the worth of the position in a pattern, see `Spacing`

    @property
    def by_score(self) -> bool:
        """Whether the accumulator decides."""
        return self in (Evict.ACC, Evict.ACC_MEAN, Evict.HEAVIEST)


@dataclass(frozen=True, slots=True)
class Spacing:
    """Pattern of positions in units of `width`.

    Unit n holds positions (n - shift) * width .. (n - shift + 1) * width - 1. A position is worth 1 where its unit's
    number is a multiple of `stride` and 0 elsewhere; with stride 0 it is worth the largest power of two that divides
    that number, and 2**31 where the number is 0.
    """

    width: int = 1
    shift: int = 0
    stride: int = 0


@dataclass(frozen=True, slots=True)
class DecodeRule:
    """Part of a policy that runs inside the decode kernel.

    Attributes:
        signal: Attention that goes into the accumulator.
        reduce: Reduction over the query heads of a group, applied to each query's probabilities.
        evict: Order of evictions when a region holds as many entries as its cap.
        decay: Factor on the old accumulator per step, for `Signal.SUM`.
        sinks: Entries with position < sinks never leave.
        shared: All KV heads of a sequence drop the same entry: the value is averaged over the KV heads first. Their
            regions must hold the same positions in the same slots.
        seed: Seed of `Evict.RANDOM`.
        spacing: Pattern of `Evict.SPACED`.
    """

    signal: Signal = Signal.NONE
    reduce: Reduce = Reduce.MEAN
    evict: Evict = Evict.NEVER
    decay: float = 1.0
    sinks: int = 0
    shared: bool = False
    seed: int = 0
    spacing: Spacing = Spacing()


#: Keep everything, gather nothing.
KEEP_ALL = DecodeRule()

#: A cap that no region reaches: the largest int32.
UNBOUNDED = 2**31 - 1


INF = float("inf")
#: Most spans of one text of which a step keeps some entries; see csrc/common/args.hpp.
MOST_LEAST = 256


def hash_priority(seed: int, head: Tensor, position: Tensor) -> Tensor:
    """Return a 24-bit hash of (seed, head, position) as float32, the value of `Evict.RANDOM`."""
    mask = 0xFFFFFFFF
    h = (position.long() * 0x9E3779B1 + head.long() * 0x85EBCA77 + (seed * 0xC2B2AE3D & mask)) & mask
    h = ((h ^ (h >> 16)) * 0x7FEB352D) & mask
    h = ((h ^ (h >> 15)) * 0x846CA68B) & mask
    h = h ^ (h >> 16)
    return (h >> 8).float()


def spaced_value(spacing: Spacing, positions: Tensor) -> Tensor:
    """Return the worth of positions in a pattern, float32: the value of `Evict.SPACED`."""
    unit = positions.long().clamp(min=0) // spacing.width + spacing.shift
    if spacing.stride:
        return (unit % spacing.stride == 0).float()
    return torch.where(unit == 0, 2**31, unit & -unit).float()


def eviction_value(rule: DecodeRule, scores: Tensor, positions: Tensor, q_pos: Tensor, n_kv_heads: int) -> Tensor:
    """Return the value (R, n) by which entries leave, lowest first.

    q_pos: (R, 1).
    """
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
    """Return (R, n) bool: whether positions (R, n) are in a span (R, k, 2) of their row."""
    begin, end = spans[..., None].unbind(2)
    return ((positions[:, None] >= begin) & (positions[:, None] < end)).any(1)


def in_full_spans(positions: Tensor, minimums: Tensor) -> Tensor:
    """Return (R, n) bool: whether a position is in a span with no entries to spare.

    positions (R, n); minimums (R, m, 3): [begin, end) and the fewest entries that stay.
    """
    begin, end, fewest = minimums[..., None].unbind(2)
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
    """Return the column (R,) that leaves, ties oldest first.

    Columns with position -1 are empty; kept and least are those of `StepRegions`.
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
