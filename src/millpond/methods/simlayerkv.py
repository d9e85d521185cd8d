"""SimLayerKV: sinks and newest tokens only in lazy layers (Zhang et al., 2024, arXiv:2410.13846)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from millpond.errors import OptionError
from millpond.methods import method
from millpond.methods._base import based_on
from millpond.methods._options import Sinks
from millpond.option_ranges import POSITIONS, SHARE
from millpond.policy.layer_allocation import LayerAllocation
from millpond.policy.policy import Policy
from millpond.policy.protect import Protect
from millpond.policy.view import View


@dataclass(frozen=True, slots=True)
class LazyLayers:
    """Layers are lazy if sinks and newest tokens get more than `threshold` of their attention.

    Attributes:
        threshold: Share of the attention, 0 to 1.
        sinks: First positions that count.
        recent: Newest positions that count.
    """

    threshold: float = 0.9
    sinks: int = 4
    recent: int = 128

    def __post_init__(self) -> None:
        if not 0 <= self.threshold <= 1:
            raise OptionError(f"threshold={self.threshold} is a share of the attention, 0 to 1")

    def check(self, n_layers: int) -> None:
        """Accept every model."""

    def measure(self, view: View) -> float:
        """Return the share of a layer's attention to the sinks and the newest tokens.

        It is over all heads of the layer.
        """
        assert view.signal is not None, "the cache provides the signal that a score declares"
        attention = view.signal.double().masked_fill(~view.valid, 0)
        protected = (view.positions < self.sinks) | (view.positions >= view.seen - self.recent)
        return float(attention.masked_fill(~protected, 0).sum() / attention.sum())

    def decide(self, measured: Sequence[float]) -> LayerAllocation:
        """Return the allocation for the measurements of all layers."""
        return Divided(tuple(share > self.threshold for share in measured))


@dataclass(frozen=True, slots=True)
class Divided:
    """Split that gives lazy layers what they protect, and the rest evenly to the others.

    All have the same if all are lazy.
    """

    lazy: tuple[bool, ...]

    def check(self, n_layers: int) -> None:
        """Accept the model whose layers were measured."""

    def wanted(self, budget: int, least: int, most: Sequence[int]) -> list[float]:
        eager = len(self.lazy) - sum(self.lazy)
        if not eager:
            return [float(budget)] * len(self.lazy)
        eager_entries = (budget * len(self.lazy) - least * sum(self.lazy)) / eager
        return [float(least) if lazy else eager_entries for lazy in self.lazy]


@method("simlayerkv", paper="arXiv:2410.13846")
def simlayerkv(
    threshold: Annotated[
        float, "a layer that pays more of its attention to sinks and newest is lazy, 0 to 1", SHARE
    ] = 0.9,
    sinks: Sinks = 4,
    recent: Annotated[int, "newest positions that always stay; the paper has 1024", POSITIONS] = 64,
    score: Annotated[str, "the method whose queries are watched, and that chooses in the other layers"] = "snapkv",
) -> Policy:
    """Let lazy layers keep sinks and newest entries alone; the other layers get the rest.

    Layer l is lazy if the last queries of the prompt (SnapKV's window of 32) pay more than the threshold to sinks and
    newest, as a mean over its heads: sum_{j < sinks or j >= n - recent} mean_{h,i} A_ij > threshold. The paper's
    thresholds are 0.65 to 0.9, by model.

    Departs from the paper: there every other layer keeps everything, so that the memory is not known beforehand. Here
    the total is the budget: the other layers share what the lazy ones leave, and `score` chooses inside them; they
    keep everything where that fits. Which layers are lazy is known when all have read the prompt, or a chunk of it:
    until the end of that pass nothing leaves. Not for assisted generation.
    """
    base = based_on("simlayerkv", score)
    assert base.score is not None, "a base has a score"
    if base.score.queries == "none":
        raise OptionError(f"simlayerkv: score={score!r} watches no attention; use one that does, such as snapkv or h2o")
    return replace(base, protect=Protect(sinks=sinks, recent=recent), layers=LazyLayers(threshold, sinks, recent))
