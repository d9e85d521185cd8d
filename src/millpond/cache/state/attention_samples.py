"""Attention that tokens of a prompt get from sampled queries, by which a storage codec leaves some of them exact."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from millpond.codec.transform.exact_tokens import FAR, LEAST_QUERIES, QUERY_STEP, SINKS, UNIT, most_attended_of_units
from millpond.kernels.args import AttentionShape
from millpond.kernels.unit_sums import UnitSumsArgs, add_unit_sums


class LayerSamples:
    """Attention per query of the tokens of one prompt in one layer.

    Every 16th query of the prompt is asked, about the tokens of its own unit of 256 alone: see
    `millpond.codec.transform.exact_tokens.attention_per_query`. The log-sum-exp of the pass is its denominator, so that
    no key outside the unit is read again. Of a unit the three tokens are exact that queries attend to most from 32
    tokens on.

    Attributes:
        n: Tokens of the prompt so far; None where the samples have gaps, so that nothing can be said.
    """

    def __init__(self) -> None:
        self.n: int | None = 0
        self._done: list[Tensor] = []  # (tokens,) bool on the CPU, of whole units
        self._whole: list[Tensor] = []  # (tokens,) sums of the largest KV head, of whole units that come behind
        self._begun = torch.zeros((0, 0))  # (Hkv, tokens so far) sums of the unit that has begun
        self._given = torch.zeros(0, dtype=torch.bool)  # of the first tokens behind `_done`: another request read them
        self._window = 0

    def begin_with(self, exact: Tensor) -> None:
        """Begin with tokens that were read before: which of them are exact, (n,) bool."""
        assert not self.n, "a prompt begins once"
        whole = len(exact) // UNIT * UNIT
        self._done, self._given = [exact[:whole]], exact[whole:]
        self.n = len(exact)

    def observe(self, q: Tensor, lse: Tensor, keys: Tensor, shape: AttentionShape) -> None:
        """Add the attention of a pass.

        Args:
            q: Queries (Hq, Q, D) of its tokens.
            lse: Log of the denominators of their attention, (Hq, Q) float32.
            keys: Keys (Hkv, N, D) of all tokens, in their order, the last ones those of the pass.
            shape: Settings of the layer.
        """
        heads, n = keys.shape[:2]
        begin = n - q.shape[1]
        if self.n != begin:
            self.n = None
            return
        first = begin - begin % UNIT
        sums = torch.zeros((heads, n - first), device=keys.device)
        if self._begun.numel():
            sums[:, : self._begun.shape[1]] = self._begun
        add_unit_sums(UnitSumsArgs(q, lse, keys, sums, UNIT, QUERY_STEP, shape, FAR))
        self._window, whole = shape.window, n // UNIT * UNIT - first
        if whole > 0:
            self._whole.append(sums[:, :whole].amax(0))
        self._begun = sums[:, whole:] if whole > 0 else sums
        self.n = n

    def exact(self) -> Tensor:
        """Return which tokens are exact, (n,) bool on the CPU.

        The first four of a text are. Of the last tokens, whose unit is not complete, it is what was seen so far.
        """
        assert self.n is not None, "the samples have no gaps"
        if self._whole:
            self._done.append(self._judged(torch.cat(self._whole)))
            self._whole, self._given = [], self._given[:0]
        begun = self._begun.amax(0) if self._begun.numel() else self._begun[:0].flatten()
        exact = torch.cat([*self._done, self._judged(begun)])
        exact[:SINKS] = True
        return exact

    def _judged(self, sums: Tensor) -> Tensor:
        """Return which tokens behind `_done` are exact.

        Sums (n,) are of whole units, or of the beginning of one.
        """
        if not len(sums):
            return self._given
        counts = _counts(min(len(sums), UNIT), self._window, sums.device)
        attention = (sums.view(-1, len(counts)) / counts).flatten().cpu()
        attention[: max(0, SINKS - sum(map(len, self._done)))] = 0  # they are exact anyway
        exact = most_attended_of_units(attention)
        exact[: len(self._given)] = self._given
        return exact


@lru_cache(maxsize=1024)
def _counts(n: int, window: int, device: torch.device) -> Tensor:
    """Return by how many queries each of the first `n` tokens of a unit is judged, (n,)."""
    asked = torch.tensor(range(QUERY_STEP - 1, n, QUERY_STEP), dtype=torch.int64)
    behind = asked[:, None] - torch.arange(n)
    seen = ((behind >= FAR) & (behind < (window or n + 1))).sum(0)
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

    def exact(self) -> Tensor:
        """Return which tokens are exact, (layers, n) bool on the CPU, see `LayerSamples.exact`."""
        return torch.stack([layer.exact() for layer in self.layers])

    def begin_with(self, exact: Tensor) -> None:
        """Begin with tokens that were read before: which of them are exact, (layers, n) bool."""
        for layer, own in zip(self.layers, exact, strict=True):
            layer.begin_with(own)
