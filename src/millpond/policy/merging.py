"""Merging of evicted entries into kept ones: the protocol, and values spread over following entries (CaM)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from millpond.errors import OptionError
from millpond.kernels.decode_rules import Evict
from millpond.kernels.merge import reference
from millpond.kernels.merge.reference import MergeColumns
from millpond.kernels.merge.rules import Links, MergeRule, Over, Weigh, sums
from millpond.policy.scores.attention import AccumulatedAttention, LastAttention, Score, WrappedScore
from millpond.policy.view import View


@dataclass(frozen=True, slots=True)
class Merged:
    """The columns of a view as they are after merging; only those that stay are stored, at their own positions.

    Attributes:
        keys: (H, N, key_dim).
        values: (H, N, value_dim), as they are stored or wider.
        log_masses: (H, N) float32, the log of how many entries a slot stands for.
        scores: (H, N) float32, the accumulators.
        memory: What the next merge of this sequence needs of this one; None for nothing.
    """

    keys: Tensor
    values: Tensor
    log_masses: Tensor
    scores: Tensor
    memory: Tensor | None = None


class Merge(Protocol):
    """What becomes of the entries that leave."""

    def merge(self, view: View, keep: Tensor, value: Tensor, seed: int) -> Merged:
        """Return the columns of `view` after those that leave were taken into those that stay.

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
    """Return what `rule` makes of a view. value: see `merging.merge`."""
    entries = MergeColumns(view.stored("keys"), view.stored("values"), view.positions, own_scores(view), view.masses)
    before = torch.full((1,), torch.nan, dtype=torch.float64, device=keep.device)
    before = before if view.memory is None else view.memory.double().view(1)
    keys, values, log_masses, scores, memory = reference.merge(rule, entries, keep, value, before, seed)
    remembers = rule.moves and not bool(memory.isnan())
    return Merged(keys, values, log_masses, scores, memory[0] if remembers else None)


def joined_masses(view: View, links: Links) -> Tensor:
    """Return (H, N) float32: the log of each mass, with that of the merged entries."""
    return reference.joined_masses(view.masses, links)


def joined_scores(view: View, links: Links) -> Tensor:
    """Return (H, N) float32: the accumulators, with those of the merged entries."""
    scores = own_scores(view)
    return scores + sums(scores, links)


def own_scores(view: View) -> Tensor:
    """Return (H, N) float32: the accumulators as they are."""
    return torch.zeros(view.positions.shape, device=view.positions.device) if view.signal is None else view.signal


@dataclass(frozen=True, slots=True)
class NewestStay(WrappedScore):
    """s_j = position of j; the attention of `base` is gathered for what merges by it."""

    base: Score = field(default_factory=AccumulatedAttention)
    evict: Evict | None = None

    def score(self, view: View, seed: int) -> Tensor:
        return view.positions.float()


@dataclass(frozen=True, slots=True)
class SpreadOverNext:
    """V_j += p_i V_i / n for each j of the n entries right behind entry i, at most `targets`; keys stay.

    Entries are evicted one after another, the oldest first; a later one passes on what it received.
    p_i = clamp(a_i / A, 0, 1), a the attention of `base` and A over what `over` says: the mean of the targets'
    attention, the mean of the kept entries after the sinks, or the largest of all kept entries. With `draw` a value
    is merged whole with probability p_i, or not at all: the draw is a hash of seed, layer, head and position. With
    `bias` n masses of p_i / n go with the values, and V_j is the mean by mass.

    Attributes:
        targets: 0 for as many as stay.
    """

    base: Score
    targets: int = 16
    over: Literal["targets", "recent", "max"] = "targets"
    draw: bool = False
    bias: bool = False
    sinks: int = 0

    def __post_init__(self) -> None:
        if self.targets < 0:
            raise OptionError(f"targets={self.targets} must not be negative; 0 takes all kept entries behind")

    @property
    def rule(self) -> MergeRule | None:
        """See `SlotMerge`: where the accumulators are the attention of `base`."""
        return self._rule if type(self.base) in (AccumulatedAttention, LastAttention) else None

    @property
    def _rule(self) -> MergeRule:
        average = isinstance(self.base, AccumulatedAttention) and self.base.average
        return MergeRule(
            Weigh.CHANCE,
            closed=self.sinks,
            targets=self.targets,
            over=Over[self.over.upper()],
            average=average,
            draw=self.draw,
            bias=self.bias,
            masses=self.bias,
        )

    def merge(self, view: View, keep: Tensor, value: Tensor, seed: int) -> Merged:
        return by_rule(self._rule, view, keep, self.base.score(view, seed), seed)
