"""Entries that leave are taken into entries that stay, by a `MergeRule`: in plain torch, over dense columns."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from millpond.kernels.links import Links, add, mean, nearest, packed, rows, sums
from millpond.kernels.merge_rule import ROUNDING, MergeRule, Over, Weigh
from millpond.kernels.reference import hash_priority, wide


class Entries(NamedTuple):
    """The columns of R regions, in the order of their positions; any numbers where there is no entry.

    The regions are the KV heads of one or more sequences, those of one next to each other.
    """

    keys: Tensor  #: (R, N, key_dim)
    values: Tensor  #: (R, N, value_dim)
    positions: Tensor  #: (R, N) int32, -1 for none
    scores: Tensor  #: (R, N) float32
    masses: Tensor  #: (R, N) float64, 1 where there is no entry


class Joined(NamedTuple):
    """What the columns are after merging."""

    keys: Tensor  #: (R, N, key_dim)
    values: Tensor  #: (R, N, value_dim)
    log_masses: Tensor  #: (R, N) float32
    scores: Tensor  #: (R, N) float32
    memory: Tensor  #: (S,) float64: the threshold of each sequence, NaN for none


def merge(rule: MergeRule, e: Entries, keep: Tensor, value: Tensor, memory: Tensor, seed: int = 0) -> Joined:
    """What becomes of the columns when those that are not kept leave.

    Args:
        keep: (R, N) bool. value: (R, N), for `Weigh.SCORE` what they leave by, for `Weigh.CHANCE` their attention.
        memory: (S,) float64: the threshold of each sequence, NaN for none. seed: of draws.
    """
    if rule.weigh is Weigh.CHANCE:
        return _into_next(rule, e, keep, value, memory, seed)
    by_score = rule.weigh is Weigh.SCORE
    gone = (e.positions >= 0) & ~keep
    sources = middle(rule, e, keep, value) if by_score else gone
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
    """(R, N) float32: the log of each mass, with that of the entries taken in."""
    together = (masses + sums(masses, links)).log()
    return torch.where(links.grows, together, masses.log()).float()


def follow(alike: Tensor, before: Tensor, rate: float) -> Tensor:
    """The thresholds (S,) after likenesses (S, n), -inf for none, given those before; NaN where nothing was met."""
    met = alike > -math.inf
    now = torch.where(met, alike, 0).sum(1) / met.sum(1)  # NaN for none
    moved = torch.where(before.isnan(), now, rate * now + (1 - rate) * before)
    return torch.where(met.any(1), moved, before)


def middle(rule: MergeRule, e: Entries, keep: Tensor, value: Tensor) -> Tensor:
    """(R, N) bool: the entries that leave and still matter."""
    there = e.positions >= 0
    worth = value.masked_fill(~there, 0).flip(1)  # so that of equal ones the newest comes first
    ordered, order = worth.sort(dim=1, descending=True, stable=True)
    ordered = ordered.double()
    enough = rule.cover * ordered.sum(1, keepdim=True)
    relevant = (ordered.cumsum(1) < enough).sum(1) + 1
    kept = keep.sum(1)
    count = torch.minimum((relevant - kept).clamp(min=0), (rule.most * kept).long())
    gone = (there & ~keep).flip(1).gather(1, order)
    matters = gone & (gone.cumsum(1) <= count[:, None])
    return torch.zeros_like(keep).scatter_(1, order, matters).flip(1)


def _mixed(rule: MergeRule, e: Entries, value: Tensor, alike: Tensor, links: Links) -> tuple[Tensor, Tensor]:
    """Keys and values with what they took in."""
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
    """(R, N): the norms of rows, in float32 or wider."""
    norms: Tensor = torch.linalg.vector_norm(x, dim=-1, dtype=wide(x.dtype))
    return norms


def _shrunk(x: Tensor, alike: Tensor, links: Links) -> Tensor:
    x = x.to(wide(x.dtype))
    weight = torch.where(links.leaves, alike, 0).to(x.dtype)
    count = 1 + sums(links.leaves.to(x.dtype), links)
    mixed = (x + sums(weight[..., None] * x, links)) / count[..., None]
    return torch.where(links.grows[..., None], mixed, x)


# ------------------------------------------------------------------------------------------------ by position


def _into_next(rule: MergeRule, e: Entries, keep: Tensor, attention: Tensor, memory: Tensor, seed: int) -> Joined:
    there = e.positions >= 0
    begin = keep.cumsum(1)  # kept entries in order have ranks 0, 1, ...; this is the first one behind a column
    kept = begin[:, -1:]
    end = torch.minimum(begin + (rule.targets or kept), kept)
    leaves = there & ~keep & (end > begin)
    attention = attention.double().masked_fill(~there, 0)
    p = _chances(rule, attention, _against(rule, e, attention.masked_fill(~keep, 0), keep, begin, end))
    if rule.draw:
        n_heads = len(keep) // len(memory)
        head = torch.arange(len(keep), device=keep.device)[:, None] % n_heads
        p = (hash_priority(seed, head, e.positions).double() / 2**24 < p).double()
    share = torch.where(leaves, p / (end - begin).clamp(min=1), 0)
    columns, _ = packed(keep)
    given, mass = spread(e.values, share * e.masses, begin, end, columns.shape[1])
    takes = mass > 0
    before, own = rows(e.values, columns), e.masses.gather(1, columns)
    together = torch.where(takes, own + mass, own)
    new = own[..., None] * before + given
    new = new / together[..., None] if rule.bias else new
    values = e.values.to(wide(e.values.dtype))
    new = torch.where(takes[..., None], new, before.double()).to(values.dtype)
    values = values.scatter(1, columns[..., None].expand_as(new), new)
    log_masses = e.masses.scatter(1, columns, together).log().float()
    return Joined(e.keys, values, log_masses, e.scores, memory)


def _chances(rule: MergeRule, attention: Tensor, against: Tensor) -> Tensor:
    return torch.where(against > 0, attention / against, (attention > 0).double()).clamp(0, 1)


def _against(rule: MergeRule, e: Entries, of_kept: Tensor, keep: Tensor, begin: Tensor, end: Tensor) -> Tensor:
    """(R, N) or (R, 1): A, given the attention of the kept entries, 0 elsewhere."""
    if rule.over is Over.MAX:
        return of_kept.amax(1, keepdim=True)
    if rule.over is Over.RECENT:
        recent = keep & (e.positions >= rule.closed)
        return of_kept.masked_fill(~recent, 0).sum(1, keepdim=True) / recent.sum(1, keepdim=True).clamp(min=1)
    below = of_kept.new_zeros(len(keep), keep.shape[1] + 1).scatter_add(1, begin, of_kept).cumsum(1)
    return (below.gather(1, end) - below.gather(1, begin)) / (end - begin).clamp(min=1)


def spread(x: Tensor, weight: Tensor, begin: Tensor, end: Tensor, ranks: int) -> tuple[Tensor, Tensor]:
    """For each of so many ranks the sums of weight * x (R, N, D) and of weight (R, N) over the columns that give to it.

    Column i gives to the ranks begin_i to end_i - 1, if weight_i > 0.

    Returns:
        (R, ranks, D) and (R, ranks) float64.
    """
    gives = weight > 0
    ones = torch.stack([weight, gives.double()], 2) * gives[..., None]
    changes = []
    for at in (begin, end):
        side = ones.new_zeros(len(x), ranks + 1, 2).scatter_add_(1, at[..., None].expand_as(ones), ones)
        changes.append(torch.cat([add(x, weight, Links(at, gives), ranks + 1), side], 2))
    running = (changes[0] - changes[1]).cumsum(1)[:, :-1]
    running = torch.where(running[..., -1:] > 0.5, running, 0)  # without the rounding of sums that ended
    return running[..., :-2], running[..., -2]
