"""EMS: eviction, then merging, by global and local attention (Li et al., 2024, arXiv:2412.08521); reconstructed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from torch import Tensor

from millpond.errors import OptionError
from millpond.kernels.merge.rules import MergeRule, Weigh
from millpond.methods import method
from millpond.methods._base import merge_steps
from millpond.methods._options import Sinks
from millpond.option_ranges import POOL_WIDTHS, QUERIES, SHARE, SOME_POSITIONS, Range
from millpond.policy.merging import Merged, by_rule
from millpond.policy.policy import Policy
from millpond.policy.protect import Protect
from millpond.policy.scores.attention import GlobalAndLocal
from millpond.policy.view import View


@dataclass(frozen=True, slots=True)
class MergeByImportance:
    """Merge of entries that matter into their class: a kept entry, or zero, which drops them.

    Of a head's score, the best entries that make up `cover` of the sum matter, but no more than `most` times as many
    as are kept. R(x, c) = cos(k_x, k_c) cos(v_x, v_c) if both are positive, else -1; x belongs to the kept c of
    highest R if that is above `threshold`, else to zero. Weights are the scores, over c and its members: values
    become their mean, keys the mean direction times the mean length. Accumulators are added up.

    Attributes:
        sinks: First positions that take nothing in.
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

    @property
    def rule(self) -> MergeRule:
        """See `SlotMerge`."""
        return MergeRule(Weigh.SCORE, closed=self.sinks, threshold=self.threshold, cover=self.cover, most=self.most)

    def merge(self, view: View, keep: Tensor, value: Tensor, seed: int) -> Merged:
        return by_rule(self.rule, view, keep, value, seed)


@method("ems", paper="arXiv:2412.08521")
def ems(
    window: Annotated[int, "last queries whose attention counts as local; their entries always stay", QUERIES] = 32,
    kernel: Annotated[int, "width of a max pool of the score over neighbouring entries; 1 for none", POOL_WIDTHS] = 1,
    threshold: Annotated[
        float, "entries less like every kept one are dropped; above 1 nothing is merged", Range(-1.0, 10.0)
    ] = 0.6,
    cover: Annotated[float, "share of the score whose entries matter: kept, or merged", SHARE] = 0.95,
    most: Annotated[
        float, "entries that may be merged at a time, as a multiple of those that are kept", Range(0.0, 1e6)
    ] = 4.0,
    sinks: Sinks = 0,
    mass_bias: Annotated[bool, "attention counts a merged entry as often as entries were merged into it"] = False,
    decode: Annotated[Literal["merge", "grow"], "after the prompt: keep merging, or grow"] = "merge",
    every: Annotated[
        int | str, "with decode=merge: entries that gather before they are merged; auto is 8", SOME_POSITIONS
    ] = "auto",
) -> Policy:
    """Keep what is attended to all along or now, and merge what matters less.

    It is merged into what is like it; the rest is dropped.

    s_j = max(g_j, l_j mean(g) / mean(l)), with g the attention from all queries and l that of the last `window`. Each
    KV head keeps its best as centres. An evicted entry in the `cover` share of the score joins the centre c of
    highest cos(k, k_c) cos(v, v_c), or the class of zero, which is dropped, if that is at most the threshold. A centre
    becomes the mean of its class by score: of the values, and of the directions and the lengths of the keys. It has
    the attention of all its members.

    Departs from the paper: it is reconstructed from the paper's abstract and its reviews, as no official code is
    public. Ours are cover, most and threshold, that a product of two negative cosines counts as unlike, and that while
    decoding the same happens whenever `every` entries have gathered beyond the budget. A look back at each step would
    cost half of the step.
    """
    if every == "auto":
        every = 8 if decode == "merge" else 1
    if not isinstance(every, int):
        raise OptionError(f"ems: every={every!r} must be a number of steps, or auto")
    return Policy(
        score=GlobalAndLocal(window, kernel),
        protect=Protect(sinks=sinks, recent=window),
        every_step=decode == "merge",
        merge=MergeByImportance(threshold, cover, most, sinks),
        mass_bias=mass_bias,
        plan_every=merge_steps("ems", every, decode == "merge"),
    )
