"""Attention that tokens of a prompt get from sampled queries, by which a storage codec leaves some of them exact."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from millpond.codec.transform.exact_tokens import LEAST_QUERIES, QUERY_STEP, SINKS, UNIT, above
from millpond.kernels.args import AttentionShape


class LayerSamples:
    """Attention per query of the tokens of one prompt in one layer.

    Every 16th query of the prompt is asked, about the tokens of its own unit alone: see
    `millpond.codec.transform.exact_tokens.attention_per_query`. The log-sum-exp of the pass is its denominator, so that
    no key outside the unit is read again.

    Args:
        threshold: Attention per query above which a token is exact.
        blocks: Numbers of tokens, each a divisor of 256: besides units of 256 tokens, tokens are also judged in units
            of these.

    Attributes:
        n: Tokens of the prompt so far; None where the samples have gaps, so that nothing can be said.
    """

    def __init__(self, threshold: float, blocks: Sequence[int] = ()) -> None:
        self._threshold = threshold
        self._done: dict[int, list[Tensor]] = {unit: [] for unit in (UNIT, *blocks)}  # (tokens,) bool, whole units
        self._sums: Tensor | None = None  # (kinds of units, Hkv, 256) of the unit that has begun
        self._known = 0  # first tokens of the unit that has begun, which another request has read
        self._given = torch.zeros(0, dtype=torch.bool)  # which of these are exact
        self._shape = AttentionShape(1.0)
        self.n: int | None = 0

    def begin_with(self, exact: Tensor) -> None:
        """Begin with tokens that were read before: which of them are exact, (n,) bool."""
        assert not self.n, "a prompt begins once"
        whole = len(exact) // UNIT * UNIT
        for done in self._done.values():
            done[:] = [exact[:whole]]
        self._given, self._known, self.n = exact[whole:], len(exact) - whole, len(exact)

    def observe(self, q: Tensor, lse: Tensor, keys: Tensor, shape: AttentionShape) -> None:
        """Add the attention of a pass.

        Args:
            q: Queries (Hq, Q, D) of its tokens.
            lse: Log of the denominators of their attention, (Hq, Q) float32.
            keys: Keys (Hkv, N, D) of all tokens, in their order, the last ones those of the pass.
            shape: Settings of the layer.
        """
        n = keys.shape[1]
        begin = n - q.shape[1]
        if self.n != begin:
            self.n = None
            return
        self._shape = shape
        whole = range(-(-begin // UNIT) * UNIT, n // UNIT * UNIT, UNIT)
        parts = [(first, 1) for first in range(begin - begin % UNIT, n, UNIT) if first not in whole]
        for first, units in sorted([*parts, *([(whole.start, len(whole))] if whole else [])]):
            low, high = max(first, begin), min(first + units * UNIT, n)
            asked = range(low + (QUERY_STEP - 1 - low) % QUERY_STEP, high, QUERY_STEP)
            if asked:
                rows = slice(asked.start - begin, high - begin, QUERY_STEP)
                places = tuple(at - first for at in asked if at < first + UNIT)
                self._add(places, units, q[:, rows], lse[:, rows], keys[:, first:high])
            if high == first + units * UNIT:
                for done, judged in zip(self._done.values(), self._judged(UNIT), strict=True):
                    done.append(judged)
                self._sums, self._known, self._given = None, 0, self._given[:0]
        self.n = n

    def exact(self, unit: int = UNIT) -> Tensor:
        """Return which tokens are exact, (n,) bool on the CPU.

        The first four of a text are. Of the last tokens, whose unit is not complete, it is what was seen so far.

        Args:
            unit: 256, or one of the blocks.
        """
        assert self.n is not None, "the samples have no gaps"
        exact = torch.cat([*self._done[unit], self._judged(self.n % UNIT)[list(self._done).index(unit)]])
        exact[:SINKS] = True
        return exact

    def _add(self, places: tuple[int, ...], units: int, q: Tensor, lse: Tensor, keys: Tensor) -> None:
        """Add the attention of queries to the tokens of one unit, or of several whole ones.

        Args:
            places: Places of the queries in their unit, the same in each.
            units: Number of units.
            q: Queries (Hq, units * m, D).
            lse: Logs of the denominators, (Hq, units * m).
            keys: Keys of the tokens, (Hkv, units * n, D).
        """
        heads, dim, shape = keys.shape[0], q.shape[2], self._shape
        n, m, group = keys.shape[1] // units, len(places), len(q) // heads
        rows = (q.float() * shape.scale).view(heads, group, units, m, dim).transpose(1, 2)
        less = lse.reshape(heads, group, units, m).transpose(1, 2).reshape(heads * units, -1, 1)
        rows = rows.reshape(heads * units, -1, dim)
        behind = keys.float().reshape(heads * units, n, dim).transpose(1, 2)
        if shape.softcap:
            logits = shape.softcap * torch.tanh(rows @ behind / shape.softcap) - less
        else:
            logits = torch.baddbmm(less, rows, behind, beta=-1)
        attention = logits.exp_().clamp_(max=1).view(-1, group, m, n).sum(1)  # above 1: not seen
        sums = torch.stack(
            [(attention * _mask(places, n, unit, shape.window, keys.device)).sum(1) / group for unit in self._done]
        ).view(len(self._done), heads, units * n)
        if self._sums is None:
            self._sums = torch.nn.functional.pad(sums, (0, -sums.shape[2] % UNIT))
        else:
            self._sums[..., :n] += sums

    def _judged(self, n: int) -> list[Tensor]:
        """Return which of the first `n` tokens of each unit of the sums are exact.

        They are (units * n,) bool on the CPU, for each kind of unit.
        """
        if self._sums is None:
            found = torch.zeros((len(self._done), n), dtype=torch.bool)
        else:
            counts = _counts(n, tuple(self._done), self._shape.window, self._sums.device)
            most = self._sums.amax(1).view(len(self._done), -1, UNIT)[..., :n] / counts[:, None]
            found = above(most, self._threshold).flatten(1).cpu()
        found[:, : self._known] = self._given
        return list(found)


@lru_cache(maxsize=256)
def _mask(at: tuple[int, ...], n: int, unit: int, window: int | None, device: torch.device) -> Tensor:
    """Return which of the first `n` tokens the queries `at` see in their own unit.

    (m, n) of 0 and 1; a query does not see itself.
    """
    tokens, queries = torch.arange(n), torch.tensor(at)[:, None]
    near = (queries > tokens) & (queries - tokens < (window or UNIT))
    return (near & (queries // unit == tokens // unit)).float().to(device)


@lru_cache(maxsize=64)
def _counts(n: int, units: tuple[int, ...], window: int | None, device: torch.device) -> Tensor:
    """Return by how many queries each of the first `n` tokens is judged, (units, n)."""
    asked = tuple(range(QUERY_STEP - 1, n, QUERY_STEP))
    if not asked:
        return torch.full((len(units), n), float(LEAST_QUERIES), device=device)
    counts = torch.stack([_mask(asked, n, unit, window, device).sum(0) for unit in units])
    return counts.clamp(min=LEAST_QUERIES)


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
