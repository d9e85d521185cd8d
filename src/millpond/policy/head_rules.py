"""Policies that give each KV head the cheapest of five nested rules that keeps enough of its attention (FastGen)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from millpond.codec.spec import Codec
from millpond.errors import NumericsError, OptionError
from millpond.kernels.decode_rules import DecodeRule, Evict
from millpond.policy.codec_refusal import WAY_OUT
from millpond.policy.eviction_plan import EvictionPlan
from millpond.policy.head_allocation import Uniform, lowest_scored
from millpond.policy.layer_allocation import EvenLayers
from millpond.policy.needs import HeadRule, Heads, Needs, TokenSource
from millpond.policy.policy import Policy
from millpond.policy.scores.attention import AccumulatedAttention
from millpond.policy.token_classes import PUNCTUATION, SPECIAL, TokenClasses
from millpond.policy.view import View


@dataclass(frozen=True, slots=True)
class NestedPlan(EvictionPlan):
    """Plan, and the rules by which its heads continue.

    Attributes:
        kinds: (H,) int64, the `HeadRule` of each head.
        local: Newest positions that `HeadRule.LOCAL` keeps.
    """

    kinds: Tensor
    local: int


@dataclass(frozen=True, slots=True)
class HeadRulesPolicy(Policy):
    """Policy that chooses a rule per head at the end of a prompt, for the decoding after it.

    Attributes:
        threshold: Share of its attention that a head's kind must recover, on average over the prompt's queries.
        frequent: Share of the text that is kept as entries of most attention.
        local: Share of the text that is kept as newest positions of the prompt.
        queries: Most queries that recovery is measured on, evenly spread; 0 for all.
        profiles_once: Whether rules that the first turn chose stay; else each turn is measured again.
        classes: Classes of token ids.
    """

    threshold: float = 0.95
    frequent: float = 0.3
    local: float = 0.3
    queries: int = 128
    profiles_once: bool = False
    classes: TokenClasses = field(default_factory=TokenClasses)

    def __post_init__(self) -> None:
        Policy.__post_init__(self)
        for name in ("threshold", "frequent", "local"):
            if not 0 <= getattr(self, name) <= 1:
                raise OptionError(f"{name}={getattr(self, name)} must lie in 0..1")
        if self.queries < 0:
            raise OptionError(f"queries={self.queries} must not be negative; 0 measures on all of them")
        alone = isinstance(self.heads, Uniform) and isinstance(self.layers, EvenLayers) and self.protect.recent == 0
        if not (alone and self.merge is None and isinstance(self.score, AccumulatedAttention)):
            raise OptionError("a method whose heads have rules of their own cannot be the score of another method")

    @property
    def needs(self) -> Needs:
        return Needs(token_ids=True, head_rules=self)

    @property
    def needs_budget(self) -> bool:
        """False: the threshold decides how much is kept."""
        return False

    @property
    def heads_alike(self) -> bool:
        return False

    @property
    def heads_may_keep_all(self) -> bool:
        return True

    def with_tokens(self, source: TokenSource) -> HeadRulesPolicy:
        return replace(self, classes=source.classes(self.classes))

    def codec_refusal(self, codec: Codec) -> str | None:
        if codec.tiered:
            return f"the rules of this method's heads drop entries for good; {WAY_OUT}"
        return Policy.codec_refusal(self, codec)

    def decode_rule(self, layer: int) -> DecodeRule:
        """Return the rule by which the kernel accumulates attention and stores every token.

        Entries that no head admits leave after the step.
        """
        return replace(Policy.decode_rule(self, layer), evict=Evict.NEVER)

    def plan(self, view: View, budget: int, *, between: bool = False) -> NestedPlan:
        """Choose the rules of the heads of `view`, and the entries that stay.

        They are at most `budget` entries a head on average.

        Raises:
            BudgetError: what must be protected does not fit.
            NumericsError: the attention is NaN.
        """
        assert view.signal is not None, "the cache provides the signal that a score declares"
        self.protect.check(budget)
        if bool((view.signal.isnan() & view.valid).any()):
            raise NumericsError(f"layer {view.layer}: attention is NaN; check the model's weights and inputs")
        settled = view.head_kinds if self.profiles_once else None
        local = _share(self.local, view.seen) if settled is None else view.head_local
        max_entries = budget * len(view.positions)
        heads = Heads(
            view.signal[None],
            view.positions[None],
            self.classes_of(view.ids, view.positions)[None],
            view.positions.new_full((1, len(view.positions)), HeadRule.FULL),
            *(torch.tensor([n], device=view.positions.device) for n in (view.seen, local, max_entries)),
        )
        outside = self.by_kind(heads)
        kinds = self._choose(view, outside, local) if settled is None else settled
        leave = outside.gather(0, kinds.view(1, -1, 1).expand(outside[:1].shape))
        leave = self._within(heads._replace(kinds=kinds[None]), leave)[0]
        return NestedPlan(view.valid & ~leave, np.full(len(kinds), budget), kinds, local)

    def classes_of(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Return the class of each entry; the first positions count as special tokens."""
        return self.classes.of(ids).masked_fill(positions < self.protect.sinks, SPECIAL)

    def _choose(self, view: View, outside: Tensor, local: int) -> Tensor:
        """Return (H,) int64: the cheapest rule that is enough for every query head of a KV head."""
        if self.threshold == 1:
            return torch.full(view.positions.shape[:1], HeadRule.FULL, device=view.positions.device)
        enough = self.recovery(view, outside, local) >= self.threshold
        enough[..., HeadRule.FULL] = True
        return enough.int().argmax(-1).amax(1)

    def recovery(self, view: View, outside: Tensor, local: int) -> Tensor:
        """Return (H, group, 5) float64: the share of each query head's attention by rule.

        mean_i sum_{j in C(i)} A_ij: an entry that is only local counts for the queries that are near to it.

        Args:
            view: Layer with the attention of its queries.
            outside: (5, H, N) bool, see `by_kind`.
            local: Newest positions that `HeadRule.LOCAL` keeps.
        """
        valid = view.valid[:, None]
        far = view.received(local, 0).double().masked_fill(~valid, 0)
        near = view.received(0, local).double().masked_fill(~valid, 0) if local else 0 * far
        total = near + far
        shares = [
            torch.where(not_kept[:, None], near if kind is HeadRule.LOCAL else 0, total).sum(-1)
            for kind, not_kept in zip(HeadRule, outside, strict=True)
        ]
        return torch.stack(shares, -1) / total.sum(-1)[..., None]

    def by_kind(self, heads: Heads) -> Tensor:
        """Return (5, H, N) bool: the entries of one sequence that each rule would not keep."""
        return torch.cat([self._outside(heads._replace(kinds=torch.full_like(heads.kinds, kind))) for kind in HeadRule])

    def quota(self, seen: Tensor) -> Tensor:
        """Return (S,) int64: how many frequent entries a head may keep of `seen` (S,) tokens."""
        return torch.tensor([_share(self.frequent, n) for n in seen.tolist()], device=seen.device)

    def leaving(self, heads: Heads) -> Tensor:
        """Return (S, H, N) bool: the entries that their head does not keep.

        Frequent entries are the best ceil(frequent * seen) of those that nothing else keeps. Where all heads of a
        sequence together hold more than they may, the longest evict entries until the total is exact: first what
        is neither special, punctuation nor in the newest half of what the head may hold, then what is not special;
        each time those of least attention.
        """
        return self._within(heads, self._outside(heads))

    def _outside(self, heads: Heads) -> Tensor:
        """Return (S, H, N) bool: the entries that the rule of their head does not keep."""
        kind, valid = heads.kinds[..., None], heads.positions >= 0
        rest = valid & ~self._fixed(heads) & ~self._near(heads) & (kind < HeadRule.FULL)
        quota = self.quota(heads.seen)
        return _lowest(heads, rest, rest.sum(-1) - quota[:, None] * (heads.kinds >= HeadRule.FREQUENT))

    def _within(self, heads: Heads, leave: Tensor) -> Tensor:
        """Return (S, H, N) bool: evicted entries, and more until a sequence is within its limit."""
        valid = heads.positions >= 0
        counts = (valid & ~leave).sum(-1)
        if not bool((counts.sum(1) > heads.most).any()):
            return leave
        pairs = zip(counts.tolist(), heads.most.tolist(), strict=True)
        allowed = torch.tensor([shorten(row, max_entries) for row, max_entries in pairs], device=leave.device)
        newest = self._near(heads) & (_age(heads) <= allowed[..., None] // 2)
        unpinned = valid & (heads.positions >= self.protect.sinks)
        for free in (valid & ~self._fixed(heads) & ~newest, valid & (heads.classes != SPECIAL), unpinned):
            spare = (valid & ~leave).sum(-1) - allowed
            leave = leave | _lowest(heads, free & ~leave, spare)
        return leave

    def _fixed(self, heads: Heads) -> Tensor:
        """Return (S, H, N) bool: entries that stay because of their tokens."""
        punctuation = (heads.classes == PUNCTUATION) & (heads.kinds[..., None] >= HeadRule.PUNCTUATION)
        return (heads.classes == SPECIAL) | punctuation

    def _near(self, heads: Heads) -> Tensor:
        """Return (S, H, N) bool: entries that stay because they are new."""
        return (_age(heads) <= heads.local[:, None, None]) & (heads.kinds[..., None] >= HeadRule.LOCAL)


def _age(heads: Heads) -> Tensor:
    """Return (S, H, N): positions since each entry, 1 for the newest."""
    return heads.seen[:, None, None] - heads.positions


def shorten(counts: Sequence[int], total: int) -> list[int]:
    """Return the counts with a sum of at most `total`: the longest are cut to one length.

    Those that were longest may keep one more.

    Example:
        >>> shorten([2, 9, 4, 9], 18)
        [2, 6, 4, 6]
    """
    out = list(counts)
    for place, i in enumerate(sorted(range(len(out)), key=lambda i: (out[i], i))):
        out[i] = min(out[i], total // (len(out) - place))
        total -= out[i]
    return out


def _share(share: float, n: int) -> int:
    """Return ceil(share * n), where rounding of the product does not count."""
    return math.ceil(round(share * n, 9))


def _lowest(heads: Heads, free: Tensor, spare: Tensor) -> Tensor:
    """Return the `spare` (S, H) free entries of least attention of each head.

    Ties leave oldest first.
    """
    n = int(spare.max())
    if n <= 0:
        return torch.zeros_like(free)
    if bool((spare >= free.sum(-1)).all()):
        return free
    value, positions, free = (t.flatten(0, 1)[:, None] for t in (heads.value, heads.positions, free))
    return lowest_scored(value, positions, free, spare.clamp(min=0).flatten()[:, None], n).view_as(heads.positions)
