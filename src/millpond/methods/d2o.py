"""D2O: dynamic discriminative operations (Wan et al., ICLR 2025, arXiv:2406.13035)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from millpond.errors import OptionError
from millpond.kernels.merge.rules import MergeRule, Weigh
from millpond.methods import method
from millpond.methods._base import merge_steps
from millpond.methods._options import Sinks
from millpond.option_ranges import POSITIONS, SHARE, SOME_POSITIONS, Range
from millpond.policy.layer_allocation import LayerAllocation, LayerTable
from millpond.policy.merging import Merged, by_rule
from millpond.policy.policy import Policy
from millpond.policy.protect import Protect
from millpond.policy.scores.attention import AccumulatedAttention
from millpond.policy.view import View


@dataclass(frozen=True, slots=True)
class AttentionDensity:
    """Budget of softmax_l(-f_l) for layer l, f_l the variance of its entries' attention.

    Attributes:
        scale: "relative": variances over the largest of all layers; "absolute": as they are; "heads": each head's
            within its layer, 0 for the smallest and 1 for the largest, and f_l is their mean.
    """

    scale: Literal["relative", "absolute", "heads"] = "relative"

    def check(self, n_layers: int) -> None:
        """Accept every model."""

    def measure(self, view: View) -> float:
        """Return f_l before it is compared with other layers: a mean over the heads."""
        assert view.signal is not None, "the cache provides the signal that a score declares"
        density = view.signal.double().masked_fill(~view.valid, 0)
        count = view.counts.double()
        spread = torch.where(view.valid, density - (density.sum(1) / count)[:, None], 0)
        variance = spread.square().sum(1) / (count - 1).clamp(min=1)
        if self.scale == "heads":
            low, high = variance.min(), variance.max()
            variance = (variance - low) / (high - low) if high > low else torch.zeros_like(variance)
        return float(variance.mean())

    def decide(self, measured: Sequence[float]) -> LayerAllocation:
        """Return the allocation for the measurements of all layers."""
        top = max(measured)
        if self.scale == "relative" and top > 0:
            measured = [f / top for f in measured]
        lowest = min(measured)
        return LayerTable(tuple(math.exp(lowest - f) for f in measured))


@dataclass(frozen=True, slots=True)
class MergeAboveThreshold:
    """Merge of an evicted e into the most alike c, if u_e = max_c cos(k_e, k_c) >= tau.

    Others are dropped. tau is the mean of u at the first merge of a sequence in a layer; later tau <- rate * mean(u) +
    (1 - rate) * tau. Keys and values of c become w_c x_c + sum_e w_e x_e with w_e = exp(u_e) / Z, w_c = e / Z, Z = e +
    sum exp(u_e). An entry that stands for m others counts m times. Accumulators are those of c.

    Attributes:
        rate: Rate of the moving average.
        sinks: First positions that take nothing in.
        shrinking: X_c <- (x_c + sum_e u_e x_e) / (1 + their number) in place of the convex weights.
    """

    rate: float = 0.7
    sinks: int = 0
    shrinking: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.rate <= 1:
            raise OptionError(f"rate={self.rate} of the moving average must lie in 0..1, and not be 0")

    @property
    def rule(self) -> MergeRule:
        """Rule of the kernel, or None: each step then ends with a plan."""
        return MergeRule(Weigh.COUNT if self.shrinking else Weigh.EXP, closed=self.sinks, rate=self.rate)

    def merge(self, view: View, keep: Tensor, value: Tensor, seed: int) -> Merged:
        return by_rule(self.rule, view, keep, value, seed)


@method("d2o", paper="arXiv:2406.13035")
def d2o(
    recent: Annotated[
        int | float, "newest entries that stay: a share of the layer's budget (0.5) or a count", POSITIONS, SHARE
    ] = 0.5,
    sinks: Sinks = 4,
    rate: Annotated[
        float | str,
        "of the threshold's moving average; auto: 0.7, or 0.5 as in the official code",
        Range(0.0, 1.0, above=True),
    ] = "auto",
    density: Annotated[
        Literal["relative", "absolute"], "variances over the largest of all layers, or as they are (the paper)"
    ] = "relative",
    variant: Annotated[Literal["paper", "official_code"], "weights, rate and density"] = "paper",
    mass_bias: Annotated[bool, "attention counts a merged entry as often as entries were merged into it"] = False,
    decode: Annotated[Literal["merge", "grow"], "after the prompt: keep merging (the paper), or grow"] = "merge",
    every: Annotated[int, "with decode=merge: entries that gather before they are merged", SOME_POSITIONS] = 1,
) -> Policy:
    """Give layers of even attention more budget, evict as H2O does, and merge similar entries.

    Layers: with F_l the variance of the attention that entries of layer l have received, its share of the whole budget
    is softmax_l(-F_l). Entries: of highest accumulated attention, and the newest. An entry that leaves, with
    u = max_c cos(k, k_c) over the kept ones, is merged into that one if u >= tau, else dropped. tau starts as the mean
    of u and follows tau <- 0.7 mean(u) + 0.3 tau, for each sequence and layer. Merged keys and values are
    x_c <- (e x_c + sum_i exp(u_i) x_i) / (e + sum_i exp(u_i)); the score of the kept entry stays its own.

    Layers are compared when all of them have read the prompt, or a chunk of it: until the end of that pass nothing
    leaves (between_chunks=False: until the first token after the prompt). Assisted generation is not possible.

    Departs from the paper: variances are taken over the largest of all layers, because those of a long prompt would
    give one layer everything (density="absolute" takes them as they are). All layers share the budget, so that the
    total is exact; the official code leaves layers 0, 1 and the last whole and does not count them. Every KV head
    decides by its own u. Sinks take nothing in. variant="official_code" has variances scaled within each layer,
    tau <- 0.5 mean(u) + 0.5 tau, and x_c <- (x_c + sum_i u_i x_i) / (1 + m), which shrinks what it merges.
    """
    official = variant == "official_code"
    if official and mass_bias:
        raise OptionError("d2o: mass_bias needs weights that sum to 1, which variant=official_code has not")
    if isinstance(rate, str):
        if rate != "auto":
            raise OptionError(f"d2o: rate={rate!r} must be a number, or auto")
        rate = 0.5 if official else 0.7
    return Policy(
        score=AccumulatedAttention(),
        protect=Protect(sinks=sinks, recent=recent),
        layers=AttentionDensity("heads" if official else density),
        every_step=decode == "merge",
        merge=MergeAboveThreshold(rate, sinks, shrinking=official),
        mass_bias=mass_bias,
        plan_every=merge_steps("d2o", every, decode == "merge"),
    )
