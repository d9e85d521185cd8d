"""Attention that tokens get from some queries behind them in their own unit, in C++ or in torch."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from millpond.kernels.args import AttentionShape
from millpond.kernels.backends import native_for


class UnitSumsArgs(NamedTuple):
    """Queries of a pass, and sums that grow by their attention to tokens of their own units.

    Unit u has the positions u * unit to (u + 1) * unit - 1.

    Attributes:
        q: Queries (Hq, Q, D).
        lse: Log of the denominators of their attention, (Hq, Q) float32.
        keys: Keys (Hkv, N, D) of all tokens in their order, the last Q those of the queries.
        sums: (Hkv, at least N - first) float32, `first` the beginning of the unit of the first query; changed.
        unit: Tokens of a unit.
        step: Query p is asked where p % step == step - 1; a divisor of the unit.
        shape: Settings of the layer.
        least: A query is asked about tokens that are at least so far before it; 1 or more.
    """

    q: Tensor
    lse: Tensor
    keys: Tensor
    sums: Tensor
    unit: int
    step: int
    shape: AttentionShape
    least: int = 1

    @property
    def begin(self) -> int:
        """Position of the first query."""
        return self.keys.shape[1] - self.q.shape[1]

    @property
    def first(self) -> int:
        """Position of the first token of the sums."""
        return self.begin - self.begin % self.unit


def add_unit_sums(args: UnitSumsArgs) -> None:
    """Add to the sum of each token the attention of queries in its unit.

    They see it, and are `least` or more behind it.

    Of the query heads of a KV head it is the mean.
    """
    native = native_for(args.q.dtype, args.q.device)
    (reference if native is None else native.add_unit_sums)(args)


def reference(args: UnitSumsArgs) -> None:
    """Run `add_unit_sums` in torch, on any device."""
    unit, step, n = args.unit, args.step, args.keys.shape[1]
    heads, dim, group = len(args.keys), args.q.shape[2], len(args.q) // len(args.keys)
    whole = range(-(-args.begin // unit) * unit, n // unit * unit, unit)
    parts = [(first, 1) for first in range(args.first, n, unit) if first not in whole]
    for first, units in [*parts, *([(whole.start, len(whole))] if whole else [])]:
        low, high = max(first, args.begin), min(first + units * unit, n)
        asked = range(low + (step - 1 - low) % step, high, step)
        if not asked:
            continue
        rows = slice(asked.start - args.begin, high - args.begin, step)
        places = tuple(at - first for at in asked if at < first + unit)
        m, width = len(places), (high - first) // units
        q = (args.q[:, rows].float() * args.shape.scale).view(heads, group, units, m, dim).transpose(1, 2)
        less = args.lse[:, rows].reshape(heads, group, units, m).transpose(1, 2).reshape(heads * units, -1, 1)
        keys = args.keys[:, first:high].float().reshape(heads * units, width, dim).transpose(1, 2)
        logits = q.reshape(heads * units, -1, dim) @ keys
        if args.shape.softcap:
            logits = args.shape.softcap * torch.tanh(logits / args.shape.softcap)
        attention = (
            (logits - less).exp_().clamp_(max=1).view(-1, group, m, width).sum(1)
        )  # above 1: rounding, or unseen
        received = (attention * _seen(places, width, args.least, args.shape.window, keys.device)).sum(1) / group
        args.sums[:, first - args.first : high - args.first] += received.view(heads, units * width)


@lru_cache(maxsize=256)
def _seen(at: tuple[int, ...], n: int, least: int, window: int, device: torch.device) -> Tensor:
    """Return about which of the first `n` tokens of a unit queries are asked.

    (m, n) of 0 and 1.
    """
    behind = torch.tensor(at)[:, None] - torch.arange(n)
    return ((behind >= least) & (behind < (window or n + 1))).float().to(device)
