"""Merging: entries that leave are taken into entries that stay. A slot that has taken others in has a mass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from millpond.policy.view import View

#: How alike the entries in columns (H, a) and (H, b) are: (H, a, b).
Likeness = Callable[[Tensor, Tensor], Tensor]
#: Sources that are compared with all targets at a time; the whole matrix is never made.
BLOCK = 256


@dataclass(frozen=True, slots=True)
class Merged:
    """The columns of a view as they are after merging; only those that stay are stored, at their own positions.

    Attributes:
        keys: (H, N, key_dim). values: (H, N, value_dim), float32 or wider.
        log_masses: (H, N) float32, the log of how many entries a slot stands for.
        scores: (H, N) float32, the accumulators.
        memory: what the next merge of this sequence wants to know of this one; None for nothing.
    """

    keys: Tensor
    values: Tensor
    log_masses: Tensor
    scores: Tensor
    memory: Tensor | None = None


class Merge(Protocol):
    """What becomes of the entries that leave."""

    def merge(self, view: View, keep: Tensor, value: Tensor, seed: int) -> Merged:
        """The columns of `view` after those that leave were taken into those that stay.

        Args:
            keep: (H, N) bool, the entries that stay; all that is pinned is among them.
            value: (H, N), the score that chose them.
        """
        ...


class Links(NamedTuple):
    """Which entries are taken in, and by which."""

    into: Tensor  #: (H, N) int64, the column that takes an entry in; its own where none does
    leaves: Tensor  #: (H, N) bool, the entries that are taken in

    @property
    def grows(self) -> Tensor:
        """(H, N) bool: the entries that take others in."""
        return sums(self.leaves.float(), self) > 0


def sums(x: Tensor, links: Links) -> Tensor:
    """(H, N) or (H, N, D): for each column the sum of x over the entries that it takes in, without its own."""
    n_heads, n = links.into.shape
    chosen = links.leaves.flatten().nonzero()[:, 0]
    into = (links.into + n * torch.arange(n_heads, device=x.device)[:, None]).flatten()[chosen]
    flat = x.flatten(0, 1)
    index = into if x.ndim == 2 else into[:, None].expand(-1, x.shape[2])
    return torch.zeros_like(flat).scatter_add_(0, index, flat[chosen]).view(x.shape)


def mean(x: Tensor, weight: Tensor, links: Links, own: Tensor | None = None) -> Tensor:
    """(H, N, D): x, where entries take others in their mean, weighted by `weight` (H, N) > 0, else unchanged.

    own: (H, N), the weight that an entry has when it takes others in; None: that of `weight`.
    """
    weight = weight.to(x.dtype)
    own = weight if own is None else own.to(x.dtype)
    total = own + sums(weight, links)
    mixed = (own[..., None] * x + sums(weight[..., None] * x, links)) / total[..., None]
    return torch.where(links.grows[..., None], mixed, x)


def joined_masses(view: View, links: Links) -> Tensor:
    """(H, N) float32: the log of each mass, with that of the entries taken in."""
    masses = view.masses
    together = (masses + sums(masses, links)).log()
    return torch.where(links.grows, together, masses.log()).float()


def joined_scores(view: View, links: Links) -> Tensor:
    """(H, N) float32: the accumulators, with those of the entries taken in."""
    scores = own_scores(view)
    return scores + sums(scores, links)


def own_scores(view: View) -> Tensor:
    """(H, N) float32: the accumulators as they are."""
    return torch.zeros(view.positions.shape, device=view.positions.device) if view.signal is None else view.signal


def cosines(x: Tensor) -> Likeness:
    """The cosines between rows of x (H, N, D)."""
    unit = F.normalize(x, dim=-1)

    def between(a: Tensor, b: Tensor) -> Tensor:
        return rows(unit, a) @ rows(unit, b).transpose(1, 2)

    return between


def rows(x: Tensor, columns: Tensor) -> Tensor:
    """(H, n, D): the rows of x (H, N, D) in columns (H, n)."""
    return x.gather(1, columns[..., None].expand(-1, -1, x.shape[-1]))


def nearest(alike: Likeness, sources: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """For each source the target that is most like it, ties to the oldest.

    Args:
        sources, targets: (H, N) bool.

    Returns:
        columns (H, N) int64 and likeness (H, N); where there is no source, or no target for it, the own column and
        -inf. Memory: H * BLOCK * (targets of a head) numbers.
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
        found = alike(some, to)
        if ragged:
            found = found.masked_fill(~is_target[:, None], float("-inf"))
        place = found.argmax(2)
        high = found.gather(2, place[..., None])[..., 0]
        real = is_source[:, begin : begin + BLOCK] & (high > float("-inf"))
        into.scatter_(1, some, torch.where(real, to.gather(1, place), some))
        best.scatter_(1, some, high.double().masked_fill(~real, float("-inf")))
    return into, best


def packed(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """The chosen columns of each head in front: (H, n) int64, and which of them are chosen, n the most of any head."""
    width = int(chosen.sum(1).max())
    columns = torch.sort(chosen.int(), dim=1, descending=True, stable=True).indices[:, :width]
    return columns, chosen.gather(1, columns)
