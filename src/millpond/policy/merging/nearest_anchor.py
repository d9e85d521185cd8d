"""Averages evicted entries into the nearest entry that the score chose (Elastic Cache)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from millpond.kernels.merge.rules import Links, mean
from millpond.policy.merging.protocol import Merged, joined_masses, own_scores
from millpond.policy.view import PARTS, View


@dataclass(frozen=True, slots=True)
class MergeIntoAnchors:
    """k_a <- mean of k_a and the k_e, and v_a likewise, over the entries e for which anchor a is the nearest.

    Anchors are the entries that stay by their score, not by protection. Near is near in the text, ties to the left.
    An entry that stands for m others counts m times. Accumulators are the anchor's. Without an anchor all are dropped.

    Attributes:
        shift: columns by which the merged entries lie before the evicted ones; the paper's code has one per sink.
    """

    shift: int = 0

    def merge(self, view: View, keep: Tensor, value: Tensor, seed: int) -> Merged:
        links = self.links(view, keep)
        keys, values = (mean(view.stored(part), view.masses, view.masses, links) for part in PARTS)
        return Merged(keys, values, joined_masses(view, links), own_scores(view))

    def links(self, view: View, keep: Tensor) -> Links:
        """Which entries are merged, and into which anchor."""
        anchors = keep & view.free
        into, reachable = nearest_in_text(view.positions, anchors)
        taken = (view.valid & ~keep).roll(-self.shift, 1)
        return Links(into, taken & reachable)


def nearest_in_text(positions: Tensor, anchors: Tensor) -> tuple[Tensor, Tensor]:
    """The column (H, N) int64 of the anchor nearest to each entry, itself where it is one; and whether there is any.

    positions: (H, N), ascending where anchors (H, N) bool lie.
    """
    n = positions.shape[1]
    column = torch.arange(n, device=positions.device).expand_as(positions)
    left = column.masked_fill(~anchors, -1).cummax(1).values
    right = column.masked_fill(~anchors, n).flip(1).cummin(1).values.flip(1)
    far = torch.iinfo(torch.int64).max
    place = positions.long()
    to_left = (place - place.gather(1, left.clamp(min=0))).masked_fill(left < 0, far)
    to_right = (place.gather(1, right.clamp(max=n - 1)) - place).masked_fill(right == n, far)
    into = torch.where(to_left <= to_right, left, right)
    reachable = (left >= 0) | (right < n)
    return torch.where(reachable, into, column), reachable
