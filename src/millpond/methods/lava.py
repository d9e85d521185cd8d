"""LAVa: budgets of layers by how spread out their scores are (Shen et al., 2025, arXiv:2509.09754)."""

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
from millpond.option_ranges import POOL_WIDTHS, QUERIES, SHARE
from millpond.policy.head_allocation import Ada
from millpond.policy.layer_allocation import LayerAllocation, LayerTable
from millpond.policy.policy import Policy
from millpond.policy.protect import Protect
from millpond.policy.scores.attention import Queries
from millpond.policy.view import View


@dataclass(frozen=True, slots=True)
class ValuedAttention:
    """s_j = max_h pool(mean_i A_ij) * max_k ||v_k||_1, of the entries before the window.

    A_ij is the attention of query i of the window and query head h of the group, pooled over neighbours by its maximum;
    the norm is the largest of the KV head.

    Attributes:
        window: Queries that are observed.
        kernel: Width of the max pool over neighbouring positions.
    """

    window: int = 32
    kernel: int = 7
    queries: Queries = "window"
    signal: Signal = Signal.SUM
    evict: Evict = Evict.ACC

    def score(self, view: View, seed: int) -> Tensor:
        largest = view.values.abs().sum(2).amax(1)
        before = view.before_window(self.window)
        means = [view.window_rows(head).float().mean(1).amax(0) for head in range(len(before))]
        attention = torch.stack(means).masked_fill(~before, 0)  # of a group, then of neighbours
        pooled = F.max_pool1d(attention[None], self.kernel, stride=1, padding=self.kernel // 2)[0]
        return (pooled.masked_fill(~before, 0) * largest[:, None]).float()


@dataclass(frozen=True, slots=True)
class LayerEntropy:
    """Budget of layer l in proportion to the entropy of its scores.

    sum_j -p_j log p_j with p = s / sum s, over the entries of all heads before the window.
    """

    score: ValuedAttention

    def check(self, n_layers: int) -> None:
        """Accept every model."""

    def measure(self, view: View) -> float:
        """Return the entropy of a layer's scores in nats.

        It is 0 where there is nothing before the window.
        """
        scores = self.score.score(view, 0)[view.before_window(self.score.window)].double()
        return float(torch.special.entr(scores / scores.sum()).sum()) if scores.sum() > 0 else 0.0

    def decide(self, measured: Sequence[float]) -> LayerAllocation:
        """Return the allocation for the entropies of all layers: even where none has any."""
        return LayerTable(tuple(measured) if any(measured) else (1.0,) * len(measured))


@method("lava", paper="arXiv:2509.09754")
def lava(
    window: Annotated[int, "queries at the prompt's end that are observed; their entries always stay", QUERIES] = 32,
    kernel: Annotated[int, "width of the max pool over neighbouring positions", POOL_WIDTHS] = 7,
    alpha: Annotated[float, "share of the layer's budget that every head is guaranteed, 0 to 1", SHARE] = 0.2,
    sinks: SinksAdded = 0,
    decode: GrowInPaper = "grow",
) -> Policy:
    """Give layers of spread-out scores more budget, and let heads of a layer compete.

    s_j = max_h pool(mean_i A_ij) * max_k ||v_k||_1 over the queries i of the window and the query heads h of the group:
    a bound of what the layer's output loses with the entry. A layer's share of the whole budget is that of the entropy
    of its normalised scores; its heads compete for it over a floor. Nothing is tuned to a model.

    Layers are compared when all of them have read the prompt, or a chunk of it: until the end of that pass nothing
    leaves (between_chunks=False: until the first token after the prompt). Assisted generation is not possible.

    Departs from the official code, which shrinks earlier layers while it reads later ones: here shares are those of all
    layers at the prompt's end, so that a pass holds more and no entry is lost to a share that grows again. The code
    blends the floor with a competition without one (allocation="official" of ada); here it is what no head falls below.
    decode="evict" keeps the budget while decoding, by the attention accumulated since the prompt's end.
    """
    score = ValuedAttention(window, kernel)
    return Policy(
        score=score,
        protect=Protect(sinks=sinks, recent=window),
        layers=LayerEntropy(score),
        heads=Ada(alpha),
        every_step=decode == "evict",
        once=decode == "once",
    )
