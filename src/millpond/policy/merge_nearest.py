"""IntoNearest: values that leave are taken into the entry whose key points most alike; keys stay as they are."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from millpond.errors import OptionError
from millpond.policy.merge import Links, Merged, cosines, joined_masses, mean, nearest, own_scores
from millpond.policy.view import View


@dataclass(frozen=True, slots=True)
class IntoNearest:
    """v_c <- (v_c + sum_e w_e v_e) / (1 + sum_e w_e) over the entries e for which c is the most alike.

    u_e = max_c cos(k_e, k_c), w_e = u_e ||v_e|| / (||v_e|| + ||v_c||). Entries with u_e below `threshold` are dropped.
    An entry that stands for m others counts m times. Accumulators are the target's.

    Attributes:
        sinks: first positions that take nothing in.
    """

    threshold: float = 0.0
    sinks: int = 0

    def __post_init__(self) -> None:
        if not self.threshold >= 0:
            raise OptionError(
                f"threshold={self.threshold} must not be negative, or weights would be; above 1 drops all"
            )

    def merge(self, view: View, keep: Tensor, value: Tensor, seed: int) -> Merged:
        targets = keep & (view.positions >= self.sinks)
        into, alike = nearest(cosines(view.keys), view.valid & ~keep, targets)
        links = Links(into, alike >= self.threshold)
        norms = torch.linalg.vector_norm(view.values, dim=-1).double()
        both = norms + norms.gather(1, into)
        weight = torch.where(links.leaves & (both > 0), alike * norms / both, 0)
        values = mean(view.values, view.masses * weight, links, own=view.masses)
        return Merged(view.keys, values, joined_masses(view, links), own_scores(view))
