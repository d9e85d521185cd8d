"""Merge rules for evicted entries as plain numbers for kernels, and the links of evicted entries to kept ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from millpond.errors import OptionError
from millpond.kernels.backends import native_for
from millpond.kernels.eager.softmax import wide


class Weigh(IntEnum):
    """Weight of an entry e in an entry c that stays; u is how alike the two are.

    With CHANCE an entry goes to the next entries by position, with all others to the one that is most like it. Of
    several that are equally alike it is the oldest. An entry that stands for m others counts m times, except in COUNT.
    """

    NORMS = 0  #: w_e = u |v_e| / (|v_e| + |v_c|), w_c = 1; values become the weighted mean, keys stay
    EXP = 1  #: w_e = exp(u), w_c = e; keys and values become the weighted mean
    COUNT = 2  #: keys and values become (x_c + sum_e u x_e) / (1 + how many e there are)
    SCORE = 3  #: w = the value by which entries leave; values, directions and lengths of keys become means
    CHANCE = 4  #: v_c += p_e v_e / n for each of the n next entries; keys stay


class Over(IntEnum):
    """Divisor of the attention of an entry to give p, at most 1, for `Weigh.CHANCE`."""

    TARGETS = 0  #: the mean over the next entries
    RECENT = 1  #: the mean over all entries that stay and are open
    MAX = 2  #: the largest of all that stay


@dataclass(frozen=True, slots=True)
class MergeRule:
    """Part of a merging policy that runs inside `ops.merge_slots`.

    u is the cosine of the keys; for `Weigh.SCORE` the product of those of keys and values, -1 unless both are above 0.

    Attributes:
        weigh: Weight of an entry, see `Weigh`.
        closed: Entries at positions below take nothing in, except by CHANCE.
        threshold: Entries are dropped if u < threshold (NORMS), or u <= threshold (SCORE).
        rate: For EXP and COUNT the threshold of a sequence is the mean of u at its first merge, and moves by this share
            towards the mean at each later one.
        cover: For SCORE, only the best entries that make up this share of a head's sum are merged.
        most: For SCORE, no more than this many times as many as stay are merged.
        targets: For CHANCE, how many entries take one in; 0 for all that come after it.
        over: Divisor of attention for CHANCE.
        average: Attention for CHANCE is that per query that saw the entry.
        draw: P is drawn: 1 where the entry's hash of `Evict.RANDOM` over 2^24 is below p, else 0.
        bias: For CHANCE: p masses go along with the value, and v_c becomes the mean by mass; needs `masses`.
        masses: Log masses are read and written; else every entry counts once.
    """

    weigh: Weigh
    closed: int = 0
    threshold: float = 0.0
    rate: float = 1.0
    cover: float = 1.0
    most: float = 0.0
    targets: int = 0
    over: Over = Over.TARGETS
    average: bool = False
    draw: bool = False
    bias: bool = False
    masses: bool = False

    def __post_init__(self) -> None:
        if self.bias and not self.masses:
            raise OptionError("a merge by mass (bias=True) needs slots that have masses (masses=True)")

    @property
    def moves(self) -> bool:
        """Whether the threshold is that of each sequence, and moves."""
        return self.weigh in (Weigh.EXP, Weigh.COUNT)


#: Cosines that differ by less are the same number, rounded in two ways.
ROUNDING = 1e-6


#: How alike the entries in columns (H, a) and (H, b) are: (H, a, b).
Likeness = Callable[[Tensor, Tensor], Tensor]
#: Sources that are compared with all targets at a time; the whole matrix is never made.
BLOCK = 256


class Links(NamedTuple):
    """Entries that are merged, and the entries that they are merged into."""

    into: Tensor  #: (H, N) int64, the column that takes an entry in; its own where none does
    leaves: Tensor  #: (H, N) bool, the entries that are merged

    @property
    def grows(self) -> Tensor:
        """(H, N) bool: the entries that take others in."""
        return sums(self.leaves.float(), self) > 0


def sums(x: Tensor, links: Links) -> Tensor:
    """Return (H, N) or (H, N, D): the sum of x over the entries merged into each column.

    Its own is not among them.
    """
    n_heads, n = links.into.shape
    merged = links.leaves.flatten().nonzero()[:, 0]
    into = (links.into + n * torch.arange(n_heads, device=x.device)[:, None]).flatten()[merged]
    flat = x.flatten(0, 1)
    index = into if x.ndim == 2 else into[:, None].expand(-1, x.shape[2])
    return torch.zeros_like(flat).scatter_add_(0, index, flat[merged]).view(x.shape)


def mean(x: Tensor, weight: Tensor, own: Tensor, links: Links) -> Tensor:
    """Return x with means where entries take others in, weighted by `weight`.

    Args:
        x: (H, N, D).
        weight: (H, N) >= 0.
        own: (H, N) > 0, the weight of an entry that takes others in.
        links: Entries that are merged, and where.

    Returns:
        (H, N, D) float32 or wider.
    """
    native = native_for(x.dtype, x.device)
    return mean_in_torch(x, weight, own, links) if native is None else native.mean_rows(x, weight, own, *links)


def mean_in_torch(x: Tensor, weight: Tensor, own: Tensor, links: Links) -> Tensor:
    x = x.to(wide(x.dtype))
    weight, own = weight.to(x.dtype), own.to(x.dtype)
    total = own + sums(weight, links)
    mixed = (own[..., None] * x + sums(weight[..., None] * x, links)) / total[..., None]
    return torch.where(links.grows[..., None], mixed, x)


def cosines(x: Tensor) -> Likeness:
    """Return the cosines between rows of x (H, N, D)."""
    unit = F.normalize(x.to(wide(x.dtype)), dim=-1)

    def between(a: Tensor, b: Tensor) -> Tensor:
        return rows(unit, a) @ rows(unit, b).transpose(1, 2)

    return between


def beside(x: Tensor) -> Tensor:
    """Return (H, N - 1): the cosines between neighbours of x (H, N, D)."""
    x = x.to(wide(x.dtype))
    lengths: Tensor = torch.linalg.vector_norm(x, dim=-1).clamp(min=1e-12)
    return (x[:, 1:] * x[:, :-1]).sum(-1) / (lengths[:, 1:] * lengths[:, :-1])


def distances(x: Tensor, links: Links) -> Tensor:
    """Return (H, N) float64: squared distance of each merged row of x (H, N, D) to its target."""
    n_heads, n = links.into.shape
    flat, merged = x.reshape(n_heads * n, -1), links.leaves.flatten().nonzero()[:, 0]
    into = (links.into + n * torch.arange(n_heads, device=x.device)[:, None]).flatten()[merged]
    sources, targets = (flat.index_select(0, at).to(wide(x.dtype)) for at in (merged, into))
    out = torch.zeros(n_heads * n, dtype=torch.float64, device=x.device)
    return out.index_copy_(0, merged, (sources - targets).square().sum(-1).double()).view(n_heads, n)


def in_both(keys: Tensor, values: Tensor) -> Likeness:
    """Return the product of the cosines of keys and values if both are positive, else -1."""
    of_keys, of_values = cosines(keys), cosines(values)

    def between(a: Tensor, b: Tensor) -> Tensor:
        x, y = of_keys(a, b), of_values(a, b)
        return torch.where((x > 0) & (y > 0), x * y, -1)

    return between


def rows(x: Tensor, columns: Tensor) -> Tensor:
    """Return (H, n, D): the rows of x (H, N, D) in columns (H, n)."""
    return x.gather(1, columns[..., None].expand(-1, -1, x.shape[-1]))


def nearest(
    keys: Tensor, values: Tensor | None, sources: Tensor, targets: Tensor, floor: float = -math.inf
) -> tuple[Tensor, Tensor]:
    """Return for each source the target most like it by key, or by key and value.

    Ties go to the oldest.

    Args:
        keys: (H, N, key_dim).
        values: (H, N, value_dim); None to compare only keys.
        sources: (H, N) bool, no target.
        targets: (H, N) bool, no source.
        floor: Likeness that a target must exceed.

    Returns:
        columns (H, N) int64 and likeness (H, N) float64; where there is no source, or no target for it, the own column
        and -inf.
    """
    native = native_for(keys.dtype, keys.device)
    if native is not None:
        nearest_entries: tuple[Tensor, Tensor] = native.nearest(keys, values, sources, targets, floor)
        return nearest_entries
    return nearest_in_torch(cosines(keys) if values is None else in_both(keys, values), sources, targets, floor)


def nearest_in_torch(
    alike: Likeness, sources: Tensor, targets: Tensor, floor: float = -math.inf
) -> tuple[Tensor, Tensor]:
    """Return `nearest` in plain torch.

    Memory: H * BLOCK * (targets of a head) numbers.
    """
    from_, is_source = packed(sources)
    to, is_target = packed(targets)
    into = torch.arange(sources.shape[1], device=sources.device).expand_as(sources).clone()
    best = torch.full(sources.shape, float("-inf"), dtype=torch.float64, device=sources.device)
    if not to.shape[1]:
        return into, best
    ragged = not bool(is_target.all())
    for begin in range(0, from_.shape[1], BLOCK):
        some = from_[:, begin : begin + BLOCK]
        cosines = alike(some, to)
        if ragged:
            cosines = cosines.masked_fill(~is_target[:, None], float("-inf"))
        place = cosines.argmax(2)
        high = cosines.gather(2, place[..., None])[..., 0]
        real = is_source[:, begin : begin + BLOCK] & (high > floor)
        into.scatter_(1, some, torch.where(real, to.gather(1, place), some))
        best.scatter_(1, some, high.double().masked_fill(~real, float("-inf")))
    return into, best


def packed(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the selected columns of each head in front: (H, n) int64, and a mask of them.

    n is the most of any head.
    """
    width = int(mask.sum(1).max())
    columns = torch.sort(mask.int(), dim=1, descending=True, stable=True).indices[:, :width]
    return columns, mask.gather(1, columns)
