"""Protocol of merging evicted entries into kept ones; a slot with merged entries has a mass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from millpond.kernels.merge import reference
from millpond.kernels.merge.reference import MergeColumns
from millpond.kernels.merge.rules import Links, MergeRule, sums
from millpond.policy.view import View


@dataclass(frozen=True, slots=True)
class Merged:
    """The columns of a view as they are after merging; only those that stay are stored, at their own positions.

    Attributes:
        keys: (H, N, key_dim). values: (H, N, value_dim), as they are stored or wider.
        log_masses: (H, N) float32, the log of how many entries a slot stands for.
        scores: (H, N) float32, the accumulators.
        memory: what the next merge of this sequence needs of this one; None for nothing.
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


@runtime_checkable
class SlotMerge(Merge, Protocol):
    """A merge that `ops.merge_slots` can carry on while decoding, without a plan."""

    @property
    def rule(self) -> MergeRule | None:
        """What the kernel does; None: in this setting it cannot, and each step ends with a plan."""
        ...


def by_rule(rule: MergeRule, view: View, keep: Tensor, value: Tensor, seed: int) -> Merged:
    """What `rule` makes of a view. value: see `merging.merge`."""
    entries = MergeColumns(view.stored("keys"), view.stored("values"), view.positions, own_scores(view), view.masses)
    before = torch.full((1,), torch.nan, dtype=torch.float64, device=keep.device)
    before = before if view.memory is None else view.memory.double().view(1)
    keys, values, log_masses, scores, memory = reference.merge(rule, entries, keep, value, before, seed)
    remembers = rule.moves and not bool(memory.isnan())
    return Merged(keys, values, log_masses, scores, memory[0] if remembers else None)


def joined_masses(view: View, links: Links) -> Tensor:
    """(H, N) float32: the log of each mass, with that of the merged entries."""
    return reference.joined_masses(view.masses, links)


def joined_scores(view: View, links: Links) -> Tensor:
    """(H, N) float32: the accumulators, with those of the merged entries."""
    scores = own_scores(view)
    return scores + sums(scores, links)


def own_scores(view: View) -> Tensor:
    """(H, N) float32: the accumulators as they are."""
    return torch.zeros(view.positions.shape, device=view.positions.device) if view.signal is None else view.signal
