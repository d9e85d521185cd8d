"""CAKE: layers share the budget by how attention spreads and shifts (Qin et al., ICLR 2025, arXiv:2503.12491)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor
from torch.nn import functional as F

from millpond.kernels.decode_rules import Evict, Signal
from millpond.methods import method
from millpond.methods._options import GrowInPaper, SinksAdded
from millpond.option_ranges import POOL_WIDTHS, QUERIES, Range
from millpond.policy.layer_allocation import LayerAllocation
from millpond.policy.policy import Policy
from millpond.policy.protect import Protect
from millpond.policy.scores.attention import Queries
from millpond.policy.view import View

TEMPERATURE = Range(0.05, 20.0)


@dataclass(frozen=True, slots=True)
class MeanAndShift:
    """s_j = mean_h pool(mean_i A_ij + gamma var_i A_ij), of the entries before the window.

    A_ij is the attention of query i of the window and query head h of the group. The pool is the average over
    neighbours before the window; padding counts as 0.

    Attributes:
        window: Queries that are observed.
        kernel: Width of the pool.
        gamma: Weight of the variance.
    """

    window: int = 32
    kernel: int = 5
    gamma: float = 200.0
    queries: Queries = "window"
    signal: Signal = Signal.SUM
    evict: Evict = Evict.ACC

    def score(self, view: View, seed: int) -> Tensor:
        numbers = []
        for head in range(len(view.positions)):
            rows = view.window_rows(head).float()
            numbers.append((rows.mean(1) + self.gamma * rows.var(1, correction=0)).mean(0))
        before = view.before_window(self.window)
        spread = F.avg_pool1d(
            torch.stack(numbers).masked_fill(~before, 0)[None], self.kernel, stride=1, padding=self.kernel // 2
        )[0]
        return spread.masked_fill(~before, 0)


@dataclass(frozen=True, slots=True)
class SharesBesideProtected:
    """Shares of what is not protected, by weights.

    Layer l has weight_l / mean(weights) times (budget - protected), and the protected entries.

    Example:
        >>> SharesBesideProtected((1.0, 3.0)).wanted(14, 4, [99, 99])
        [9.0, 19.0]
    """

    weights: tuple[float, ...]

    def check(self, n_layers: int) -> None:
        """Accept every model."""

    def wanted(self, budget: int, least: int, most: Sequence[int]) -> list[float]:
        total = sum(self.weights)
        return [least + max(budget - least, 0) * len(most) * weight / total for weight in self.weights]


@dataclass(frozen=True, slots=True)
class Preference:
    """Budget of layer l, beside its window, in proportion to P_l.

    P_l = E_l^(1 / spread) * V_l^(1 / shift) with E_l = -sum A_ij log A_ij over the window's queries i, the entries j
    before it and all query heads, and V_l = the sum over entries and query heads of the variance of A_ij over i.
    """

    score: MeanAndShift
    spread: float = 1.0
    shift: float = 1.0

    def check(self, n_layers: int) -> None:
        """Accept every model."""

    def measure(self, view: View) -> float:
        """Return P_l; 0 where there is nothing before the window."""
        before, entropy, variance = view.before_window(self.score.window), 0.0, 0.0
        for head in before.any(1).nonzero()[:, 0].tolist():
            rows = view.window_rows(head).double()[..., before[head]]
            entropy += float(torch.special.entr(rows).sum())
            variance += float(rows.var(1, correction=0).sum())
        return float(entropy ** (1 / self.spread) * variance ** (1 / self.shift))

    def decide(self, measured: Sequence[float]) -> LayerAllocation:
        """Return the allocation for what was measured of all layers: even where nothing was."""
        return SharesBesideProtected(tuple(measured) if any(measured) else (1.0,) * len(measured))


@method("cake", paper="arXiv:2503.12491")
def cake(
    window: Annotated[int, "queries at the prompt's end that are observed; their entries always stay", QUERIES] = 32,
    kernel: Annotated[int, "width of the average pool over neighbouring positions", POOL_WIDTHS] = 5,
    gamma: Annotated[float, "weight of the variance of an entry's attention", Range(0.0, 1e6)] = 200.0,
    spread: Annotated[float, "temperature of the entropy in a layer's share, tau_1", TEMPERATURE] = 1.0,
    shift: Annotated[float, "temperature of the variance in a layer's share, tau_2", TEMPERATURE] = 1.0,
    sinks: SinksAdded = 0,
    decode: GrowInPaper = "grow",
) -> Policy:
    """Give layers whose attention spreads and shifts more budget.

    With A the attention of the window's queries to the entries before it, a layer's share of what is not the window's
    is that of P = E^(1 / tau_1) V^(1 / tau_2): E the entropy of A, V the variance of A over the queries, both summed.
    Within a layer every head keeps as many entries, those of highest mean + gamma * variance, pooled.

    Layers are compared when all of them have read the prompt, or a chunk of it: until the end of that pass nothing
    leaves (between_chunks=False: until the first token after the prompt). Assisted generation is not possible.

    Departs from the official code, which shrinks earlier layers while it reads later ones: here shares are those of all
    layers at the prompt's end. The temperatures are tuned per model and budget there, for Llama-3.1-8B spread=1.6 and
    shift=0.4 at 1,024 entries; here both are 1, its default. The variance is that of all queries of the window, not an
    estimate by one fewer. decode="evict" keeps the budget while decoding, by the attention since the prompt's end.
    """
    score = MeanAndShift(window, kernel, gamma)
    return Policy(
        score=score,
        protect=Protect(sinks=sinks, recent=window),
        layers=Preference(score, spread, shift),
        every_step=decode == "evict",
        once=decode == "once",
    )
