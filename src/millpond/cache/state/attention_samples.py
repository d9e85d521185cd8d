"""Attention that tokens of a prompt get from sampled queries, by which a storage codec leaves some of them exact."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from millpond.codec.transform.exact_tokens import (
    FAR,
    LEAST_QUERIES,
    QUERY_STEP,
    SINKS,
    UNIT,
    above,
    most_attended_of_units,
)
from millpond.kernels.args import AttentionShape
from millpond.kernels.unit_sums import UnitSumsArgs, add_unit_sums


class LayerSamples:
    """Attention per query of the tokens of one prompt in one layer.

    Every 16th query of the prompt is asked, about the tokens of its own unit alone: see
    `millpond.codec.transform.exact_tokens.attention_per_query`. The log-sum-exp of the pass is its denominator, so that
    no key outside the unit is read again. Of 256 tokens the three are exact that queries attend to most from 32 tokens
    on; of fewer, those above the threshold.

    Args:
        threshold: Attention per query above which a token of a block is exact.
        blocks: Numbers of tokens, each a divisor of 256: besides units of 256 tokens, tokens are also judged in units
            of these.

    Attributes:
        n: Tokens of the prompt so far; None where the samples have gaps, so that nothing can be said.
    """

    def __init__(self, threshold: float, blocks: Sequence[int] = ()) -> None:
        self._units = {unit: _Units(unit, threshold) for unit in (UNIT, *blocks)}
        self.n: int | None = 0

    def begin_with(self, exact: Tensor) -> None:
        """Begin with tokens that were read before: which of them are exact, (n,) bool."""
        assert not self.n, "a prompt begins once"
        for units in self._units.values():
            units.begin_with(exact)
        self.n = len(exact)

    def observe(self, q: Tensor, lse: Tensor, keys: Tensor, shape: AttentionShape) -> None:
        """Add the attention of a pass.

        Args:
            q: Queries (Hq, Q, D) of its tokens.
            lse: Log of the denominators of their attention, (Hq, Q) float32.
            keys: Keys (Hkv, N, D) of all tokens, in their order, the last ones those of the pass.
            shape: Settings of the layer.
        """
        n = keys.shape[1]
        if self.n != n - q.shape[1]:
            self.n = None
            return
        for units in self._units.values():
            units.observe(q, lse, keys, shape)
        self.n = n

    def exact(self, unit: int = UNIT) -> Tensor:
        """Return which tokens are exact, (n,) bool on the CPU.

        The first four of a text are. Of the last tokens, whose unit is not complete, it is what was seen so far.

        Args:
            unit: 256, or one of the blocks.
        """
        assert self.n is not None, "the samples have no gaps"
        exact = self._units[unit].exact()
        exact[:SINKS] = True
        return exact


class _Units:
    """Tokens of one prompt and layer, judged in units of one length."""

    def __init__(self, unit: int, threshold: float) -> None:
        self._unit, self._least, self._threshold = unit, FAR if unit == UNIT else 1, threshold
        self._done: list[Tensor] = []  # (tokens,) bool on the CPU, of whole units
        self._whole: list[Tensor] = []  # (tokens,) sums of the largest KV head, of whole units that come behind
        self._begun = torch.zeros((0, 0))  # (Hkv, tokens so far) sums of the unit that has begun
        self._given = torch.zeros(0, dtype=torch.bool)  # of the first tokens behind `_done`: another request read them
        self._window = 0

    def begin_with(self, exact: Tensor) -> None:
        """Begin with tokens that were read before: which of them are exact, (n,) bool."""
        whole = len(exact) // self._unit * self._unit
        self._done, self._given = [exact[:whole]], exact[whole:]

    def observe(self, q: Tensor, lse: Tensor, keys: Tensor, shape: AttentionShape) -> None:
        """Add the attention of a pass, as `LayerSamples.observe`."""
        heads, n = keys.shape[:2]
        begin = n - q.shape[1]
        first = begin - begin % self._unit
        sums = torch.zeros((heads, n - first), device=keys.device)
        if self._begun.numel():
            sums[:, : self._begun.shape[1]] = self._begun
        add_unit_sums(UnitSumsArgs(q, lse, keys, sums, self._unit, QUERY_STEP, shape, self._least))
        self._window, whole = shape.window, n // self._unit * self._unit - first
        if whole > 0:
            self._whole.append(sums[:, :whole].amax(0))
        self._begun = sums[:, whole:] if whole > 0 else sums

    def exact(self) -> Tensor:
        """Return which tokens are exact by their attention, (n,) bool on the CPU."""
        if self._whole:
            self._done.append(self._judged(torch.cat(self._whole)))
            self._whole, self._given = [], self._given[:0]
        begun = self._begun.amax(0) if self._begun.numel() else self._begun[:0].flatten()
        return torch.cat([*self._done, self._judged(begun)])

    def _judged(self, sums: Tensor) -> Tensor:
        """Return which tokens behind `_done` are exact.

        Sums (n,) are of whole units, or of the beginning of one.
        """
        if not len(sums):
            return self._given
        counts = _counts(min(len(sums), self._unit), self._least, self._window, sums.device)
        attention = (sums.view(-1, len(counts)) / counts).flatten().cpu()
        if self._unit == UNIT:
            attention[: max(0, SINKS - sum(map(len, self._done)))] = 0  # they are exact anyway
            exact = most_attended_of_units(attention)
        else:
            exact = above(attention, self._threshold)
        exact[: len(self._given)] = self._given
        return exact


@lru_cache(maxsize=1024)
def _counts(n: int, least: int, window: int, device: torch.device) -> Tensor:
    """Return by how many queries each of the first `n` tokens of a unit is judged, (n,)."""
    asked = torch.tensor(range(QUERY_STEP - 1, n, QUERY_STEP), dtype=torch.int64)
    behind = asked[:, None] - torch.arange(n)
    seen = ((behind >= least) & (behind < (window or n + 1))).sum(0)
    return seen.clamp(min=LEAST_QUERIES).float().to(device)


@dataclass(frozen=True, slots=True)
class AttentionSamples:
    """Samples of one prompt in all layers with attention.

    Attributes:
        layers: Those of each layer.
    """

    layers: list[LayerSamples]

    @property
    def n(self) -> int | None:
        """Tokens of the prompt that all layers have seen; None where they have gaps."""
        (n, *others) = {layer.n for layer in self.layers}
        return None if others else n

    def has_seen(self, n: int) -> bool:
        """Return whether all layers have seen the first `n` tokens."""
        return self.n is not None and self.n >= n

    def exact(self, unit: int = UNIT) -> Tensor:
        """Return which tokens are exact, (layers, n) bool on the CPU, see `LayerSamples.exact`."""
        return torch.stack([layer.exact(unit) for layer in self.layers])

    def begin_with(self, exact: Tensor) -> None:
        """Begin with tokens that were read before: which of them are exact, (layers, n) bool."""
        for layer, own in zip(self.layers, exact, strict=True):
            layer.begin_with(own)


@dataclass(frozen=True, slots=True)
class SampledAttention:
    """Rule by which prompts are sampled.

    Attributes:
        thresholds: Attention per query above which a token is exact, of each layer.
        block: Tokens of a block of the prefix tree, see `LayerSamples`.
    """

    thresholds: tuple[float, ...]
    block: int

    def samples(self) -> AttentionSamples:
        """Return the samples of a prompt that begins."""
        blocks = [self.block] if self.block < UNIT else []
        return AttentionSamples([LayerSamples(threshold, blocks) for threshold in self.thresholds])
