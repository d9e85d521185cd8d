"""KVMerger: runs of similar neighbours merged into one entry (Wang et al., 2024, arXiv:2407.08454)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from millpond.errors import OptionError
from millpond.kernels.decode_rules import Evict
from millpond.kernels.merge.rules import Links, beside, distances, mean
from millpond.methods import method
from millpond.methods._base import merge_steps
from millpond.methods._options import SinksAdded
from millpond.option_ranges import POSITIONS, SHARE, SOME_POSITIONS, Range, brief
from millpond.policy.head_allocation import AboveThreshold, Uniform
from millpond.policy.layer_allocation import EvenLayers
from millpond.policy.merging import Merged, joined_masses, joined_scores
from millpond.policy.policy import Policy
from millpond.policy.protect import Protect
from millpond.policy.scores.attention import AccumulatedAttention, Score, WrappedScore
from millpond.policy.selection import rank_by_value
from millpond.policy.view import PARTS, View

#: Thresholds of a cosine, above 1 for none, and how many of them.
EPS, MAX_LAYERS = Range(-1.0, 10.0), 1_024


@dataclass(frozen=True, slots=True)
class RunPivots(WrappedScore):
    """Order of the pivots of runs, by the attention of `base`, before all other entries.

    Scores of the others are below 0.

    Attributes:
        eps: Cosine above which neighbours join, of all layers or of each; None: as many join as the budget asks.
        top: Share of the budget for the entries of most attention, which stay as they are.
        shared: One set of runs for all heads, by the means over them.
    """

    base: Score = field(default_factory=AccumulatedAttention)
    eps: float | tuple[float, ...] | None = None
    top: float = 0.24
    shared: bool = False
    evict: Evict | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.top <= 1:
            raise OptionError(f"top={self.top} is a share of the budget, 0 to 1")
        each = self.eps if isinstance(self.eps, tuple) else () if self.eps is None else (self.eps,)
        if not all(math.isfinite(eps) for eps in each):
            raise OptionError(f"eps={self.eps} must be a finite number; a cosine lies in -1..1")

    def score(self, view: View, seed: int) -> Tensor:
        attention = self.attention(view, seed)
        pivot = run_pivots(attention, self.runs(view, attention), view.valid)
        column = torch.arange(attention.shape[1], device=attention.device)
        below = attention - 1 - attention.masked_fill(~view.valid, 0).amax()
        return torch.where(pivot == column, attention, below)

    def attention(self, view: View, seed: int) -> Tensor:
        """Return (H, N): what pivots are chosen by."""
        return self._across(self.base.score(view, seed))

    def runs(self, view: View, attention: Tensor) -> Tensor:
        """Return (H, N) int64: the number of each entry's run, ascending like positions."""
        joinable, similarity = self.neighbours(view, attention)
        if self.eps is not None:
            joins = joinable & (similarity > (self.eps[view.layer] if isinstance(self.eps, tuple) else self.eps))
        else:
            excess = (view.counts - view.budget).clamp(min=0)
            joins = joinable & (rank_by_value(similarity, joinable, torch.zeros_like(joinable)) < excess[:, None])
        return (~joins).cumsum(1) - 1

    def neighbours(self, view: View, attention: Tensor) -> tuple[Tensor, Tensor]:
        """Return which entries may join the one before, (H, N) bool, and their keys' cosines."""
        free = view.free
        never_merged = rank_by_value(attention, free, torch.zeros_like(free)) < math.floor(self.top * view.budget)
        free = free & ~never_merged
        joinable = free & F.pad(free[:, :-1], (1, 0))
        return joinable, self._across(F.pad(beside(view.stored("keys")), (1, 0)))

    def _across(self, x: Tensor) -> Tensor:
        return x.mean(0, keepdim=True).expand_as(x) if self.shared else x


@dataclass(frozen=True, slots=True)
class CalibratedLayers(EvenLayers):
    """Even budgets of a model with as many layers as there are thresholds."""

    n_layers: int

    def check(self, n_layers: int) -> None:
        if n_layers != self.n_layers:
            raise OptionError(
                f"kvmerger: eps has {self.n_layers} thresholds, and the model has {n_layers} layers that hold entries; "
                "measure it with millpond.hf.calibration.merging.layer_thresholds"
            )


@dataclass(frozen=True, slots=True)
class GaussianRuns:
    """k* = sum_i w_i k_i, v* = sum_i w_i v_i over a run, for the entry of it that stays.

    w_i = g_i / sum g, g_i = exp(-||k_p - k_i||^2 / (2 sigma^2)), p the entry that stays; the one of most attention
    where several do. An entry that stands for m others counts m times. Accumulators are added up.
    """

    pivots: RunPivots
    sigma: float = 5.0

    def __post_init__(self) -> None:
        if not self.sigma > 0:
            raise OptionError(f"sigma={self.sigma} must be above 0")

    def merge(self, view: View, keep: Tensor, value: Tensor, seed: int) -> Merged:
        attention = self.pivots.attention(view, seed)
        into = run_pivots(attention, self.pivots.runs(view, attention), keep)
        links = Links(into.clamp(min=0), view.valid & ~keep & (into >= 0))
        distance = distances(view.stored("keys"), links)
        weight = view.masses * (-distance / (2 * self.sigma**2)).exp()
        keys, values = (mean(view.stored(part), weight, view.masses, links) for part in PARTS)
        return Merged(keys, values, joined_masses(view, links), joined_scores(view, links))


def run_pivots(value: Tensor, run: Tensor, may: Tensor) -> Tensor:
    """Return (H, N) int64: the column of highest value in each entry's run.

    Only entries that `may` be pivots count; -1 for none.
    """
    value = value.double().masked_fill(~may, float("-inf"))
    highest = torch.full_like(value, float("-inf")).scatter_reduce(1, run, value, "amax").gather(1, run)
    column = torch.arange(value.shape[1], device=value.device).expand_as(run)
    column = torch.where(may & (value == highest), column, -1)
    return torch.full_like(run, -1).scatter_reduce(1, run, column, "amax").gather(1, run)


@method("kvmerger", paper="arXiv:2407.08454")
def kvmerger(
    eps: Annotated[
        float | str,
        "neighbours of a higher cosine are merged (the paper has 0.75): a number, or one for each layer, as 0.9;0.8; "
        "auto: as many as the budget asks",
        EPS,
    ] = "auto",
    sigma: Annotated[float, "width of the Gaussian weights", Range(1e-6, 1e6)] = 5.0,
    recent: Annotated[
        int | float, "newest entries that stay as they are: a share of the budget, or a count", POSITIONS, SHARE
    ] = 0.34,
    top: Annotated[
        float, "share of the budget for the entries of most attention, which stay as they are", SHARE
    ] = 0.24,
    sinks: SinksAdded = 0,
    shared: Annotated[bool, "one set of runs for all heads of a layer, by the mean over them"] = False,
    mass_bias: Annotated[bool, "attention counts a merged entry as often as entries were merged into it"] = False,
    decode: Annotated[Literal["grow", "merge"], "after the prompt: grow (the paper), or keep merging"] = "grow",
    every: Annotated[int, "with decode=merge: entries that gather before they are merged", SOME_POSITIONS] = 1,
) -> Policy:
    """Merge runs of neighbouring entries with similar keys into their most attended one.

    Each KV head has its own runs.

    Entries j - 1 and j join if cos(k_j-1, k_j) > eps and neither is protected (Algorithm 1); a chain of such pairs is
    a run. Its pivot p is the entry of most accumulated attention, and k* = sum_i w_i k_i, v* = sum_i w_i v_i with
    w_i = g_i / sum g and g_i = exp(-||k_p - k_i||^2 / (2 sigma^2)). The merged entry has the position of its pivot and
    the attention of the whole run. The protected shares are the paper's at a budget of one half (17 % and 12 % of the
    prompt).

    Departs from the paper: with eps="auto" each head has its own threshold, the similarity at which exactly the budget
    is left; where protected entries allow no more joining, the pivots of least attention leave. With numbers the
    budget is the most that stays ("100%" leaves eps alone). sigma is 5, the best of the paper's search; its formula
    for sigma refers to itself, and its fixed point keeps the pivot alone. All layers merge (there the first two and
    the last do not), so that the total is the budget. What follows on a run that was merged counts as its neighbour.

    One threshold for each layer is the paper's too, which holds that a layer merges the same share of any text:
    `millpond.hf.calibration.merging.layer_thresholds` measures them, and eps takes them with semicolons between.
    Texts are left near the budget then, not at it. "auto" keeps the budget and needs no measurement, so it is the
    default, though thresholds of layers, with which heads hold different numbers of entries, lose less (rows below).
    """
    fixed = _thresholds(eps) if isinstance(eps, str) else eps
    if decode == "merge" and fixed is not None:
        raise OptionError("kvmerger: decode=merge keeps a budget, which a fixed eps has not; leave eps=auto")
    pivots = RunPivots(eps=fixed, top=top, shared=shared)
    return Policy(
        score=pivots,
        protect=Protect(sinks=sinks, recent=recent),
        heads=Uniform() if fixed is None else AboveThreshold(0.0),
        layers=CalibratedLayers(len(fixed)) if isinstance(fixed, tuple) else EvenLayers(),
        shared=shared and fixed is None,
        every_step=decode == "merge",
        merge=GaussianRuns(pivots, sigma),
        mass_bias=mass_bias,
        plan_every=merge_steps("kvmerger", every, decode == "merge"),
    )


def _thresholds(eps: str) -> tuple[float, ...] | None:
    """Return the thresholds of the layers; None for "auto".

    Raises:
        OptionError: a part that is no cosine, or too many of them.
    """
    if eps == "auto":
        return None
    parts = eps.split(";", MAX_LAYERS)
    try:
        thresholds = tuple(float(part) for part in parts)
    except ValueError:
        thresholds = ()
    if not thresholds or len(thresholds) > MAX_LAYERS or not all(EPS.holds(number) for number in thresholds):
        raise OptionError(
            f"kvmerger: eps={brief(eps)} must be a number, or auto, or at most {MAX_LAYERS:,} numbers, {EPS}, with "
            "semicolons between, one for each layer"
        )
    return thresholds
