"""DuoAttention: retrieval heads and streaming heads (Xiao et al., ICLR 2025, arXiv:2410.10819)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from torch import Tensor

from millpond.errors import CacheMismatchError, OptionError
from millpond.kernels.decode_rules import Evict, Signal
from millpond.methods import method
from millpond.methods._base import based_on
from millpond.option_files import FILE, read_file
from millpond.option_ranges import POSITIONS, SHARE
from millpond.policy.layer_allocation import LayerAllocation, apportion
from millpond.policy.policy import Policy
from millpond.policy.protect import Protect
from millpond.policy.scores.attention import WrappedScore
from millpond.policy.view import View


@dataclass(frozen=True, slots=True)
class RetrievalHeads:
    """A KV head is a retrieval head if its number is above the threshold.

    Attributes:
        threshold: 0 to 1.
        sinks: First positions that count as near.
        recent: Newest positions that count as near.
        grows: Retrieval heads keep all that comes while decoding.
        table: The numbers, a row per layer.
        empty: The share of the observed attention that goes beyond what is near.
    """

    threshold: float = 0.5
    sinks: int = 4
    recent: int = 64
    grows: bool = True
    table: tuple[tuple[float, ...], ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.threshold <= 1:
            raise OptionError(f"threshold={self.threshold} must lie in 0..1")

    def check(self, n_layers: int) -> None:
        if self.table and len(self.table) != n_layers:
            raise OptionError(f"a table of head classes for {len(self.table)} layers; the model has {n_layers}")

    def decide(self, view: View) -> DividedHeads:
        """Return which heads of `view` are retrieval heads."""
        return DividedHeads(tuple(self.retrieval(view).tolist()), self.grows)

    def retrieval(self, view: View) -> Tensor:
        """Return (H,) bool.

        Raises:
            CacheMismatchError: the table is of another model.
        """
        if not self.table:
            return self._far_share(view) > self.threshold
        row = self.table[view.layer]
        if len(row) != len(view.positions):
            raise CacheMismatchError(
                f"layer {view.layer} has {len(view.positions)} KV heads, the table of head classes has {len(row)} there"
            )
        return torch.tensor(row, device=view.positions.device) > self.threshold

    def _far_share(self, view: View) -> Tensor:
        assert view.signal is not None, "the cache provides the signal that a score declares"
        attention = view.signal.double().masked_fill(~view.valid, 0)
        protected = (view.positions < self.sinks) | (view.positions >= view.seen - self.recent)
        return attention.masked_fill(protected, 0).sum(1) / attention.sum(1)

    def layer_share(self, view: View) -> float:
        """Return the share of a layer's heads that are retrieval heads."""
        return float(self.retrieval(view).double().mean())


@dataclass(frozen=True, slots=True)
class DividedHeads:
    """Streaming heads keep what is protected; retrieval heads have equal parts of the rest.

    What retrieval heads have no use for goes to the streaming heads, and all heads are alike if none is a retrieval
    head, so that the total is exact.
    """

    retrieval: tuple[bool, ...]
    grow: bool = False
    every: int = 0

    @property
    def grows(self) -> Tensor:
        return torch.tensor(self.retrieval) & self.grow

    def floor(self, protected: Tensor, budget: Tensor | int) -> Tensor:
        return protected.clamp(min=1)

    def keep_counts(self, value: Tensor, valid: Tensor, pinned: Tensor, budget: int) -> Tensor:
        entries = valid.sum(1).tolist()
        min_entries = int(self.floor((pinned & valid).sum(1), budget).max())
        total = min(budget * len(entries), sum(entries))
        shares_wanted = [float(total) if far else 0.0 for far in self.retrieval]
        return torch.tensor(apportion(shares_wanted, total, min_entries, entries), device=value.device)


@dataclass(frozen=True, slots=True)
class RetrievalLayers:
    """Equal budgets for all retrieval heads; streaming heads keep what they protect.

    Attributes:
        shares: Share of each layer's KV heads that are retrieval heads.

    Example:
        >>> RetrievalLayers((1.0, 0.5, 0.0)).wanted(20, 8, [100] * 3)
        [32.0, 20.0, 8.0]
        >>> RetrievalLayers((1.0, 0.5, 0.0)).wanted(20, 8, [26] * 3)
        [26.0, 20.0, 14.0]
    """

    shares: tuple[float, ...]

    def check(self, n_layers: int) -> None:
        if len(self.shares) != n_layers:
            raise OptionError(f"shares of retrieval heads for {len(self.shares)} layers; the model has {n_layers}")

    def wanted(self, budget: int, least: int, most: Sequence[int]) -> list[float]:
        free_entries = [max(m - least, 0) for m in most]
        unprotected = float((budget - least) * len(most))
        retrieval = distribute(unprotected, self.shares, free_entries)
        streaming = distribute(unprotected - sum(retrieval), [1 - share for share in self.shares], free_entries)
        return [least + a + b for a, b in zip(retrieval, streaming, strict=True)]


@dataclass(frozen=True, slots=True)
class ProfiledLayers:
    """`RetrievalLayers` whose shares are known when all layers have read the prompt."""

    heads: RetrievalHeads

    def check(self, n_layers: int) -> None:
        """Accept every model."""

    def measure(self, view: View) -> float:
        """Return the share of a layer's heads that are retrieval heads."""
        return self.heads.layer_share(view)

    def decide(self, measured: Sequence[float]) -> LayerAllocation:
        """Return the allocation for layers of which this was measured."""
        return RetrievalLayers(tuple(measured))


def distribute(amount: float, weights: Sequence[float], capacities: Sequence[float]) -> list[float]:
    """Return each weight times min(level, capacity), at the level where their sum is `amount`.

    Example:
        >>> distribute(6.0, [1.0, 1.0, 0.5], [1.0, 9.0, 9.0])
        [1.0, 3.3333333333333335, 1.6666666666666667]
    """
    level = 0.0
    for top in sorted(set(capacities)):
        slope = sum(w for w, r in zip(weights, capacities, strict=True) if r >= top)
        if slope * (top - level) >= amount:
            level += amount / slope if slope else 0.0
            break
        amount -= slope * (top - level)
        level = float(top)
    return [w * min(level, r) for w, r in zip(weights, capacities, strict=True)]


@dataclass(frozen=True, slots=True)
class ThenRecency(WrappedScore):
    """Another score for the prompt; while decoding the oldest leave."""

    signal: Signal = Signal.NONE
    evict: Evict = Evict.OLDEST

    def score(self, view: View, seed: int) -> Tensor:
        return self.base.score(view, seed)


@method("duo_attention", paper="arXiv:2410.10819")
def duo_attention(
    heads: Annotated[
        str, "a JSON file, per layer a list of one number per KV head; empty: profiled from the prompt", FILE
    ] = "",
    threshold: Annotated[float, "a head whose number is above is a retrieval head, 0 to 1", SHARE] = 0.5,
    sinks: Annotated[int, "first positions that always stay; the paper has 64", POSITIONS] = 4,
    recent: Annotated[int, "newest positions that always stay; the paper has 256", POSITIONS] = 64,
    score: Annotated[str, "the method that chooses inside retrieval heads, and whose queries are watched"] = "snapkv",
    across: Annotated[bool, "retrieval heads of all layers have equal parts; else every layer has its budget"] = False,
    decode: Annotated[
        Literal["grow", "evict"], "retrieval heads after the prompt: grow (the paper), or evict at each step"
    ] = "grow",
) -> Policy:
    """Let streaming heads keep sinks and newest entries alone; retrieval heads get the rest.

    Which heads are retrieval heads says a table of numbers from 0 (streaming) to 1 (retrieval), such as the gates
    that the authors train, or the prompt: the share of a head's observed attention that goes beyond sinks and newest,
    sum_{sinks <= j < n - recent} sum_i A_ij / sum_ij A_ij. Retrieval heads share what the streaming heads leave in
    equal parts; `score` chooses inside them, and they keep everything where that fits. With `across` they share what
    the streaming heads of all layers leave. That is known at once from a table; from a profile when all layers have
    read it, or a chunk of it: until the end of that pass nothing leaves, and assisted generation is not possible.

    Departs from the paper: there retrieval heads keep everything, whatever that takes; here the total is the budget.
    Its gates are trained on passkeys, and a quantile of them parts the heads; here a threshold does. Heads are those
    of the cache, groups of query heads. Where the whole prompt fits into the budget all heads may fill up to the same
    length before any evicts. A head profiled as a streaming head stays one in later turns: it holds nothing far.
    """
    base = based_on("duo_attention", score)
    assert base.score is not None, "a base has a score"
    if base.prefill == "greedy":
        raise OptionError(f"duo_attention: score={score!r} plans at each token; leave out prefill=greedy")
    if decode == "evict" and base.score.evict is None:
        raise OptionError(f"duo_attention: decode=evict, but score={score!r} plans at each step; take decode=grow")
    if not heads and base.score.queries not in ("all", "window"):
        raise OptionError(
            f"duo_attention: score={score!r} watches no attention; use one that does, such as snapkv or h2o, or name "
            "a table of heads"
        )
    split = RetrievalHeads(threshold, sinks, recent, decode == "grow", _table(heads) if heads else ())
    return replace(
        base,
        score=ThenRecency(base.score) if decode == "grow" else base.score,
        protect=Protect(sinks=sinks, recent=recent),
        heads=split,
        layers=_layers(split) if across else base.layers,
        every_step=True,
    )


def _layers(split: RetrievalHeads) -> RetrievalLayers | ProfiledLayers:
    shares = tuple(sum(number > split.threshold for number in row) / len(row) for row in split.table)
    return RetrievalLayers(shares) if shares else ProfiledLayers(split)


def _table(path: str) -> tuple[tuple[float, ...], ...]:
    try:
        rows = json.loads(read_file(path))
    except (ValueError, RecursionError) as error:
        raise OptionError(f"duo_attention: heads={path!r} cannot be read as JSON: {error}") from None
    is_table = isinstance(rows, list) and rows and all(isinstance(row, list) and row for row in rows)
    if not is_table or not all(isinstance(number, int | float) for row in rows for number in row):
        raise OptionError(f"duo_attention: heads={path!r} must be a list of layers, each a list of one number per head")
    return tuple(tuple(float(number) for number in row) for row in rows)
