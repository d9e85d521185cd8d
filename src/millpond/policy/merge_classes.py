"""IntoClasses: what still matters is merged into the kept entry that is like it in key and value, or dropped (EMS)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from millpond.errors import OptionError
from millpond.policy.merge import Likeness, Links, Merged, cosines, joined_masses, joined_scores, mean, nearest
from millpond.policy.select import rank_by_value
from millpond.policy.view import View


@dataclass(frozen=True, slots=True)
class IntoClasses:
    """Entries that leave and matter are merged into their class, a kept entry, or into the class of zero and dropped.

    Of a head's score, the best entries that make up `cover` of the sum matter, but no more than `most` times as many
    as are kept. R(x, c) = cos(k_x, k_c) cos(v_x, v_c) if both are positive, else -1; x belongs to the kept c of
    highest R if that is above `threshold`, else to zero. Weights are the scores, over c and its members: values
    become their mean, keys the mean direction times the mean length. Accumulators are added up.

    Attributes:
        sinks: first positions that take nothing in.
    """

    threshold: float = 0.6
    cover: float = 0.95
    most: float = 4.0
    sinks: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.cover <= 1:
            raise OptionError(f"cover={self.cover} is a share of the score, 0 to 1")
        if not 0 <= self.most < math.inf:
            raise OptionError(f"most={self.most} must not be negative")
        if not self.threshold >= -1:
            raise OptionError(f"threshold={self.threshold} must be at least -1")

    def merge(self, view: View, keep: Tensor, value: Tensor, seed: int) -> Merged:
        targets = keep & (view.positions >= self.sinks)
        into, alike = nearest(in_both(view), self.middle(view, keep, value), targets)
        links = Links(into, alike > self.threshold)
        weight = value.double().clamp(min=torch.finfo(torch.float32).tiny)
        values = mean(view.values, weight, links)
        lengths = torch.linalg.vector_norm(view.keys, dim=-1, keepdim=True)
        direction = F.normalize(mean(F.normalize(view.keys, dim=-1), weight, links), dim=-1)
        keys = torch.where(links.grows[..., None], direction * mean(lengths, weight, links), view.keys)
        return Merged(keys, values, joined_masses(view, links), joined_scores(view, links))

    def middle(self, view: View, keep: Tensor, value: Tensor) -> Tensor:
        """(H, N) bool: the entries that leave and still matter."""
        ordered = value.double().masked_fill(~view.valid, 0).sort(1, descending=True).values
        enough = self.cover * ordered.sum(1, keepdim=True)
        relevant = (ordered.cumsum(1) < enough).sum(1) + 1
        kept = keep.sum(1)
        count = torch.minimum((relevant - kept).clamp(min=0), (self.most * kept).long())
        gone = view.valid & ~keep
        return gone & (rank_by_value(value, gone, torch.zeros_like(gone)) < count[:, None])


def in_both(view: View) -> Likeness:
    """The product of the cosines of keys and of values where both are positive, else -1."""
    of_keys, of_values = cosines(view.keys), cosines(view.values)

    def between(a: Tensor, b: Tensor) -> Tensor:
        x, y = of_keys(a, b), of_values(a, b)
        return torch.where((x > 0) & (y > 0), x * y, -1)

    return between
