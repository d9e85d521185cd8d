"""Merging of evicted entries into kept ones by a `MergeRule` in plain torch: the reference for `ops.merge_slots`."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from millpond.kernels.args import EntryRows, MergeArgs
from millpond.kernels.decode_rules import DecodeRule, eviction_value, hash_priority
from millpond.kernels.eager.pages import read, write
from millpond.kernels.eager.softmax import INF, wide
from millpond.kernels.merge.rules import ROUNDING, Links, MergeRule, Over, Weigh, mean, nearest, rows, sums

#: Columns that are solved together, unless a column reaches further.
BLOCK = 32


def chain(x: Tensor, share: Tensor, reach: Tensor) -> Tensor:
    """Return y_j = x_j + sum of share_i * y_i over columns i before j with j - i <= reach_i.

    What a column gives includes what it received, as when columns leave in their order.

    Args:
        x: (R, N, D) float.
        share: (R, N), share that a column gives to each one in reach; 0 for none.
        reach: (R, N) int64.

    Returns:
        (R, N, D) in the dtype of `x`. Entries that receive nothing are unchanged.
    """
    n_regions, n, dim = x.shape
    max_reach = int(reach.amax())
    size = max(BLOCK, max_reach)  # so that a block gives to itself and to the next one alone
    pad = -n % size
    share, reach = (F.pad(part, (0, pad)).view(n_regions, -1, 1, size) for part in (share.to(x.dtype), reach))
    column = torch.arange(size, device=x.device)
    distance = column[:, None] - column
    inside = torch.where((distance > 0) & (distance <= reach), -share, 0).transpose(0, 1).contiguous()
    across = torch.where(distance + size <= reach, share, 0)[..., size - max_reach :].transpose(0, 1).contiguous()
    y = F.pad(x, (0, 0, 0, pad)).view(n_regions, -1, size, dim).transpose(0, 1).contiguous()
    for block in range(len(y)):
        if block:
            y[block].baddbmm_(across[block - 1], y[block - 1, :, size - max_reach :])
        y[block] = torch.linalg.solve_triangular(inside[block], y[block], upper=False, unitriangular=True)
    return y.transpose(0, 1).reshape(n_regions, n + pad, dim)[:, :n]


class MergeColumns(NamedTuple):
    """Columns of R regions in the order of positions; undefined where there is no entry.

    The regions are the KV heads of one or more sequences, those of one next to each other.
    """

    keys: Tensor  #: (R, N, key_dim)
    values: Tensor  #: (R, N, value_dim)
    positions: Tensor  #: (R, N) int32, -1 for none
    scores: Tensor  #: (R, N) float32
    masses: Tensor  #: (R, N) float64, 1 where there is no entry


class Joined(NamedTuple):
    """Columns after merging."""

    keys: Tensor  #: (R, N, key_dim)
    values: Tensor  #: (R, N, value_dim)
    log_masses: Tensor  #: (R, N) float32
    scores: Tensor  #: (R, N) float32
    memory: Tensor  #: (S,) float64: the threshold of each sequence, NaN for none


def merge(rule: MergeRule, e: MergeColumns, keep: Tensor, value: Tensor, memory: Tensor, seed: int = 0) -> Joined:
    """Return the columns after those that are not kept leave.

    Args:
        rule: Rule of the merge.
        e: Columns before.
        keep: (R, N) bool, the entries that stay.
        value: (R, N): for `Weigh.SCORE` the value they leave by, for `Weigh.CHANCE` their attention.
        memory: (S,) float64: the threshold of each sequence, NaN for none.
        seed: Seed of draws.
    """
    if rule.weigh is Weigh.CHANCE:
        return _into_next(rule, e, keep, value, memory, seed)
    by_score = rule.weigh is Weigh.SCORE
    evicted = (e.positions >= 0) & ~keep
    sources = middle(rule, e, keep, value) if by_score else evicted
    targets = keep & (e.positions >= rule.closed)
    floor = rule.threshold if by_score and not rule.moves else -math.inf  # nothing asks how unlike others are
    into, alike = nearest(e.keys, e.values if by_score else None, sources, targets, floor)
    if rule.moves:
        memory = follow(alike.view(len(memory), -1), memory, rule.rate)
        bound = memory.repeat_interleave(len(keep) // len(memory))[:, None]
        links = Links(into, torch.isfinite(alike) & ~(alike < bound - ROUNDING))
    else:
        links = Links(into, alike > rule.threshold if by_score else alike >= rule.threshold)
    keys, values = _mixed(rule, e, value, alike, links)
    scores = e.scores + sums(e.scores, links) if by_score else e.scores
    return Joined(keys, values, joined_masses(e.masses, links), scores, memory)


def joined_masses(masses: Tensor, links: Links) -> Tensor:
    """Return (R, N) float32: the log of each mass, with that of the merged entries."""
    together = (masses + sums(masses, links)).log()
    return torch.where(links.grows, together, masses.log()).float()


def follow(alike: Tensor, before: Tensor, rate: float) -> Tensor:
    """Return thresholds (S,) after likenesses (S, n), given those before.

    A likeness is -inf for none; a threshold is NaN where no likeness was met.
    """
    met = alike > -math.inf
    now = torch.where(met, alike, 0).sum(1) / met.sum(1)  # NaN for none
    moved = torch.where(before.isnan(), now, rate * now + (1 - rate) * before)
    return torch.where(met.any(1), moved, before)


def middle(rule: MergeRule, e: MergeColumns, keep: Tensor, value: Tensor) -> Tensor:
    """Return (R, N) bool: the entries that leave and still matter."""
    exists = e.positions >= 0
    worth = value.masked_fill(~exists, 0).flip(1)  # so that of equal ones the newest comes first
    ordered, order = worth.sort(dim=1, descending=True, stable=True)
    ordered = ordered.double()
    enough = rule.cover * ordered.sum(1, keepdim=True)
    relevant = (ordered.cumsum(1) < enough).sum(1) + 1
    n_kept = keep.sum(1)
    count = torch.minimum((relevant - n_kept).clamp(min=0), (rule.most * n_kept).long())
    evicted = (exists & ~keep).flip(1).gather(1, order)
    matters = evicted & (evicted.cumsum(1) <= count[:, None])
    return torch.zeros_like(keep).scatter_(1, order, matters).flip(1)


def _mixed(rule: MergeRule, e: MergeColumns, value: Tensor, alike: Tensor, links: Links) -> tuple[Tensor, Tensor]:
    """Return keys and values with the evicted ones mixed in."""
    if rule.weigh is Weigh.EXP:
        weight, own = e.masses * alike.exp(), e.masses * math.e
        return mean(e.keys, weight, own, links), mean(e.values, weight, own, links)
    if rule.weigh is Weigh.COUNT:
        return _shrunk(e.keys, alike, links), _shrunk(e.values, alike, links)
    if rule.weigh is Weigh.NORMS:
        norms = _lengths(e.values).double()
        both = norms + norms.gather(1, links.into)
        weight = torch.where(links.leaves & (both > 0), alike * norms / both, 0)
        return e.keys, mean(e.values, e.masses * weight, e.masses, links)
    weight = value.double().clamp(min=torch.finfo(torch.float32).tiny)
    lengths = _lengths(e.keys)
    of_unit = weight / lengths.double().clamp(min=1e-12)
    direction = F.normalize(mean(e.keys, of_unit, of_unit, links), dim=-1)
    length = mean(lengths[..., None], weight, weight, links)
    keys = torch.where(links.grows[..., None], direction * length, e.keys)
    return keys, mean(e.values, weight, weight, links)


def _lengths(x: Tensor) -> Tensor:
    """Return (R, N): the norms of rows, in float32 or wider."""
    norms: Tensor = torch.linalg.vector_norm(x, dim=-1, dtype=wide(x.dtype))
    return norms


def _shrunk(x: Tensor, alike: Tensor, links: Links) -> Tensor:
    x = x.to(wide(x.dtype))
    weight = torch.where(links.leaves, alike, 0).to(x.dtype)
    count = 1 + sums(links.leaves.to(x.dtype), links)
    mixed = (x + sums(weight[..., None] * x, links)) / count[..., None]
    return torch.where(links.grows[..., None], mixed, x)


# ------------------------------------------------------------------------------------------------ by position


def _into_next(rule: MergeRule, e: MergeColumns, keep: Tensor, attention: Tensor, memory: Tensor, seed: int) -> Joined:
    """Evict entries one after another, oldest first, each into the next entries.

    A later one passes on what was merged into it.
    """
    exists = e.positions >= 0
    n_kept, columns = keep.sum(1, keepdim=True), torch.arange(keep.shape[1], device=keep.device)
    n_after = (exists.sum(1, keepdim=True) - 1 - columns).clamp(min=0)
    reach = torch.minimum(n_after, torch.full_like(n_kept, rule.targets) if rule.targets else n_kept)
    attention = attention.double().masked_fill(~exists, 0)
    p = _chances(attention, _against(rule, e, attention, keep, reach))
    if rule.draw:
        n_heads = len(keep) // len(memory)
        head = torch.arange(len(keep), device=keep.device)[:, None] % n_heads
        p = (hash_priority(seed, head, e.positions).double() / 2**24 < p).double()
    share = torch.where(exists & ~keep, p / reach.clamp(min=1), 0)
    values = e.values.to(wide(e.values.dtype))
    if not rule.bias:
        return Joined(e.keys, chain(values, share, reach), e.masses.log().float(), e.scores, memory)
    masses = e.masses.to(values.dtype)[..., None]
    received = chain(torch.cat([masses * values, masses], 2), share, reach)
    together, new = received[..., -1:], received[..., :-1] / received[..., -1:]
    takes = together > masses
    log_masses = torch.where(takes, together, masses).log().float()[..., 0]
    return Joined(e.keys, torch.where(takes, new, values), log_masses, e.scores, memory)


def _chances(attention: Tensor, against: Tensor) -> Tensor:
    return torch.where(against > 0, attention / against, (attention > 0).double()).clamp(0, 1)


def _against(rule: MergeRule, e: MergeColumns, attention: Tensor, keep: Tensor, reach: Tensor) -> Tensor:
    """Return (R, N) or (R, 1): A, given the attention of entries, 0 if there is none."""
    if rule.over is Over.MAX:
        return attention.masked_fill(~keep, 0).amax(1, keepdim=True)
    if rule.over is Over.RECENT:
        recent = keep & (e.positions >= rule.closed)
        return attention.masked_fill(~recent, 0).sum(1, keepdim=True) / recent.sum(1, keepdim=True).clamp(min=1)
    below = F.pad(attention.cumsum(1), (1, 0))
    next_one = torch.arange(1, keep.shape[1] + 1, device=keep.device).expand_as(reach)
    return (below.gather(1, next_one + reach) - below.gather(1, next_one)) / reach.clamp(min=1)


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
    exists = positions >= 0
    pinned = (positions < leave.sinks) | (q_pos - positions < args.recent[:, None])
    weakest = value.double().masked_fill(pinned, INF).masked_fill(~exists, INF)
    first = weakest.sort(dim=1, stable=True).indices  # ties: the oldest leaves
    rank = torch.empty_like(first).scatter_(1, first, torch.arange(width, device=first.device).expand_as(first))
    keep = exists & (rank >= spare[:, None])
    stored_value = value
    if rule.weigh is Weigh.CHANCE:
        stored_value = scores / (q_pos - positions + 1).clamp(min=1) if rule.average else scores
    entries = MergeColumns(keys, values, positions, scores, masses)
    due = spare > 0
    joined = merge(rule, entries, keep, stored_value, memory, leave.seed)
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
    """Return (R, n): the value by which entries leave, lowest first.

    q_pos: (R, 1).
    """
    if local is None:
        return eviction_value(leave, scores, positions, q_pos, n_kv_heads)
    return blend(scores.masked_fill(positions < 0, 0), local.masked_fill(positions < 0, 0))


def blend(overall: Tensor, local: Tensor) -> Tensor:
    """Return max(overall, local * sum(overall) / sum(local)) along each row of (R, N)."""
    factor = overall.double().sum(1, keepdim=True) / local.double().sum(1, keepdim=True)
    return torch.maximum(overall, (local * factor).float())
