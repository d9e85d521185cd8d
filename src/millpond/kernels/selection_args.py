"""Arguments of ops that choose which entries of a prompt stay, and that move these to their pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from millpond.kernels.args import PageRegions


class _OfValues:
    """Arguments of an op that runs on the device of its values."""

    __slots__ = ()
    value: Tensor

    @property
    def device(self) -> torch.device:
        return self.value.device


@dataclass(frozen=True, slots=True)
class BestArgs(_OfValues):
    """Entries of R regions in the order of their positions, and how many of each stay.

    Attributes:
        value: (R, N) float32, higher is kept; every column has an entry.
        pinned: (R, m, 2) int32, spans [begin, end) of columns that are kept before others.
        counts: (R,) int32, entries that stay, 0 to N.
        width: The most of `counts`.
    """

    value: Tensor
    pinned: Tensor
    counts: Tensor
    width: int


class Best(NamedTuple):
    """The entries of R regions that stay."""

    columns: Tensor  #: (R, width) int32, ascending; anything from counts[r] on
    is_nan: Tensor  #: (R,) bool, whether some value of the region is NaN


@dataclass(frozen=True, slots=True)
class ShareArgs(_OfValues):
    """Entries of L layers, by position, whose heads compete for a number of them.

    Attributes:
        value: (L, H, N) float32, higher is kept; every column has an entry.
        pinned: (L * H, m, 2) int32, see `BestArgs`.
        least: (L,) int32, entries that every head of a layer keeps, pinned ones included; at most N.
        total: (L,) int32, entries that all heads of a layer keep together, at most H * N; where that is less than
            H * least, every head keeps `least`.
    """

    value: Tensor
    pinned: Tensor
    least: Tensor
    total: Tensor


@dataclass(frozen=True, slots=True)
class MoveArgs:
    """Entries of R regions, and the pages that they move to.

    Attributes:
        source: Regions that hold them.
        target: Regions whose slots 0 .. counts[r] - 1 are written; `lens` are neither read nor written. They are those
            of `source` itself, of the same `table`, or no page of one is a page of the other.
        columns: (R, width) int32 slots of the source, ascending; anything from counts[r] on.
        counts: (R,) int32, entries of each region.
        scores: (R, N) float32, scores to store in place of those in the source, by its slots; None: they stay.
    """

    source: PageRegions
    target: PageRegions
    columns: Tensor
    counts: Tensor
    scores: Tensor | None = None

    @property
    def device(self) -> torch.device:
        return self.source.device

    @property
    def in_place(self) -> bool:
        """Whether the entries stay in their pages."""
        return self.source.pages is self.target.pages and self.source.table is self.target.table
