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
    """Columns of a view after merging.

    Only those that stay are stored, at their own positions.

    Attributes:
        keys: (H, N, key_dim).
        values: (H, N, value_dim) in the dtype of the cache or a wider one.
        log_masses: (H, N) float32, the log of how many entries a slot stands for.
        scores: (H, N) float32, the accumulators.
        memory: State for the next merge of this sequence; None for nothing.
    """

    keys: Tensor
    values: Tensor
    log_masses: Tensor
    scores: Tensor
    memory: Tensor | None = None


class Merge(Protocol):
    """Rule for the entries that leave."""

    def merge(self, view: View, keep: Tensor, value: Tensor, seed: int) -> Merged:
        """Return the columns of `view` after those that leave are merged into those that stay.

        Args:
            view: Entries of one layer before the eviction.
            keep: (H, N) bool, the entries that stay, all pinned ones among them.
            value: (H, N), the score that chose them.
            seed: Seed of random draws.
        """
        ...


@runtime_checkable
class SlotMerge(Merge, Protocol):
    """Merge that `ops.merge_slots` can continue while decoding, without a plan."""

    @property
    def rule(self) -> MergeRule | None:
        """Rule of the kernel, or None: each step then ends with a plan."""
        ...


def by_rule(rule: MergeRule, view: View, keep: Tensor, value: Tensor, seed: int) -> Merged:
    """Return the columns of a view after `rule` has merged them; `value` as in `Merge.merge`."""
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
    """Return (H, N) float32: the accumulators of the view."""
    return torch.zeros(view.positions.shape, device=view.positions.device) if view.signal is None else view.signal


@dataclass(frozen=True, slots=True)
class NewestStay(WrappedScore):
    """s_j = position of j; the attention of `base` is recorded for merges that use it."""

    base: Score = field(default_factory=AccumulatedAttention)
    evict: Evict | None = None

    def score(self, view: View, seed: int) -> Tensor:
        return view.positions.float()


@dataclass(frozen=True, slots=True)
class SpreadOverNext:
    """V_j += p_i V_i / n for each j of the n entries after entry i, at most `targets`.

    Keys stay. Entries are evicted one after another, the oldest first; a later one passes on what it received. p_i =
    clamp(a_i / A, 0, 1), a the attention of `base` and A over what `over` says: the mean of the targets' attention, the
    mean of the kept entries after the sinks, or the largest of all kept entries. With `draw` a value is merged whole
    with probability p_i, or not at all: the draw is a hash of seed, layer, head and position. With `bias` n masses of
    p_i / n go with the values, and V_j is the mean by mass.

    Attributes:
        targets: Entries that share a value; 0 for all that stay.
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
        """Rule of the kernel, if the accumulators are the attention of `base`."""
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
