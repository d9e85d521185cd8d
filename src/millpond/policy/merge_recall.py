"""RecallNearest: of what leaves, whatever is alike enough is merged; the threshold follows what was met (D2O)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from millpond.errors import OptionError
from millpond.policy.merge import Links, Merged, cosines, joined_masses, mean, nearest, own_scores, sums
from millpond.policy.view import View

#: Cosines that differ by less are the same number, rounded in two ways.
ROUNDING = 1e-6


@dataclass(frozen=True, slots=True)
class RecallNearest:
    """An entry e that leaves is merged into c, the most alike, if u_e = max_c cos(k_e, k_c) >= tau, else dropped.

    tau is the mean of u at the first merge of a sequence in a layer; later tau <- rate * mean(u) + (1 - rate) * tau.
    Keys and values of c become w_c x_c + sum_e w_e x_e with w_e = exp(u_e) / Z, w_c = e / Z, Z = e + sum exp(u_e).
    An entry that stands for m others counts m times. Accumulators are those of c.

    Attributes:
        rate: of the moving average. sinks: first positions that take nothing in.
        shrinking: x_c <- (x_c + sum_e u_e x_e) / (1 + their number) in place of the convex weights.
    """

    rate: float = 0.7
    sinks: int = 0
    shrinking: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.rate <= 1:
            raise OptionError(f"rate={self.rate} of the moving average must lie in 0..1, and not be 0")

    def merge(self, view: View, keep: Tensor, value: Tensor, seed: int) -> Merged:
        targets = keep & (view.positions >= self.sinks)
        into, alike = nearest(cosines(view.keys), view.valid & ~keep, targets)
        threshold = self.threshold(alike, view.memory)
        enough = alike > float("-inf") if threshold is None else alike >= threshold - ROUNDING
        links = Links(into, enough)
        keys, values = (self._mix(x, alike, view.masses, links) for x in (view.keys, view.values))
        return Merged(keys, values, joined_masses(view, links), own_scores(view), threshold)

    def threshold(self, alike: Tensor, before: Tensor | None) -> Tensor | None:
        """The threshold after likenesses (H, N), -inf for none, given the one before; None if nothing was ever met."""
        met = alike[alike > float("-inf")]
        if not len(met):
            return before
        now = met.mean()
        return now if before is None else self.rate * now + (1 - self.rate) * before

    def _mix(self, x: Tensor, alike: Tensor, masses: Tensor, links: Links) -> Tensor:
        if not self.shrinking:
            return mean(x, masses * alike.exp(), links, own=masses * math.e)
        weight = torch.where(links.leaves, alike, 0).to(x.dtype)
        count = 1 + sums(links.leaves.to(x.dtype), links)
        mixed = (x + sums(weight[..., None] * x, links)) / count[..., None]
        return torch.where(links.grows[..., None], mixed, x)
