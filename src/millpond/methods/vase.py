"""VaSE: the widest values stay, the rest is drawn by attention (Chang et al., 2026, arXiv:2606.03928)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated

import torch
from torch import Tensor

from millpond.errors import OptionError
from millpond.kernels.decode_rules import Evict
from millpond.methods import method
from millpond.methods._options import PlannedDecode, PromptStays, RoundLength, Sinks
from millpond.option_ranges import POOL_WIDTHS, QUERIES, SEEDS, SHARE
from millpond.policy.policy import Policy
from millpond.policy.protect import Protect
from millpond.policy.scores.attention import Score, WindowAttention, WrappedScore
from millpond.policy.scores.draws import gumbel_top_k
from millpond.policy.selection import rank_by_value
from millpond.policy.view import View

#: Above every number that is drawn: these are at most -log(-log(1 - 2**-24)), below 17.
_WIDEST = 64.0


@dataclass(frozen=True, slots=True)
class WideValuesAndDraws(WrappedScore):
    """Entries by max_c v_jc - min_c v_jc, then by a draw in proportion to `base`.

    Attributes:
        base: Weights of the draw, attention to each entry.
        large: Share of the budget for the widest values of a head, sinks among them.
        sinks: First positions, which the policy protects.
    """

    base: Score = field(default_factory=lambda: WindowAttention(window=64, kernel=5, pool="avg"))
    large: float = 0.25
    sinks: int = 4
    evict: Evict | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.large <= 1:
            raise OptionError(f"large={self.large} must lie in 0..1")

    def score(self, view: View, seed: int) -> Tensor:
        weights = self.base.score(view, seed)
        values = view.stored("values")
        width = (values.amax(-1) - values.amin(-1)).to(weights.dtype)
        count = max(math.floor(self.large * view.budget) - self.sinks, 0)
        rank = rank_by_value(width, view.free, torch.zeros_like(view.free))
        drawn = gumbel_top_k(weights.log(), seed, view)
        return torch.where(view.free & (rank < count), _WIDEST + count - rank, drawn)


@method("vase", paper="arXiv:2606.03928")
def vase(
    large: Annotated[float, "share of the budget for the widest values, sinks among them, 0 to 1", SHARE] = 0.25,
    window: Annotated[int, "last queries whose attention weighs the draw; their entries always stay", QUERIES] = 64,
    kernel: Annotated[int, "width of the average pool over neighbouring positions", POOL_WIDTHS] = 5,
    every: RoundLength = 64,
    prompt: PromptStays = False,
    sinks: Sinks = 4,
    seed: Annotated[int, "same seed, same draws, whatever the batch", SEEDS] = 0,
    decode: PlannedDecode = "evict",
) -> Policy:
    """Keep the widest values, and draw the rest by attention, anew each round.

    A value's width is max_c v_jc - min_c v_jc over its channels; `large` of the budget goes to the widest of a KV head,
    because long chains of thought go round in circles without them. Sinks, whose values are narrow, stay by their
    position. The other places are drawn without replacement, in proportion to the attention of the last `window`
    queries (mean over queries and group, average pool), anew in each head and round. While decoding `every` entries
    gather first.

    Departs from the official code: attention is the model's own, over all that the queries see (there the softmax is
    over the candidates); a prompt beyond the budget is compressed at its end (there while decoding); neighbours in the
    pool are neighbours in the text (there slots in the order of an earlier round). prompt=true protects the prompt as
    `random_attention` does, the control that this has to beat.
    """
    return Policy(
        score=WideValuesAndDraws(WindowAttention(window=window, kernel=kernel, pool="avg"), large, sinks),
        protect=Protect(sinks=sinks, recent=window, prompt=prompt),
        every_step=decode == "evict",
        plan_every=every if decode == "evict" else 1,
        seed=seed,
    )
