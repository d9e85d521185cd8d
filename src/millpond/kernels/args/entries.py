"""Arguments of the ops that write entries into pages and read them back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class PaddedEntries(NamedTuple):
    """Entries read out of pages, padded to one width. Padding has position -1, and so has a tombstone."""

    keys: Tensor  #: (R, width, key_dim); of packed pages float32, channels that were dropped are zero
    values: Tensor  #: (R, width, value_dim); of packed pages float32
    positions: Tensor  #: (R, width) int32
    scores: Tensor  #: (R, width) float32
    log_masses: Tensor | None = None  #: (R, width) float32; None where the pages have no masses


def joined(parts: Sequence[PaddedEntries]) -> PaddedEntries:
    """The columns of several runs of entries of the same regions, one behind the other; all have masses, or none."""
    columns = list(zip(*parts, strict=True))[:4]
    keys, values, positions, scores = (torch.cat(column, 1) for column in columns)
    masses = [part.log_masses for part in parts if part.log_masses is not None]
    return PaddedEntries(keys, values, positions, scores, torch.cat(masses, 1) if masses else None)


@dataclass(frozen=True, slots=True)
class EntryRows:
    """Rows to store in R regions: row index[r, i] of region r goes to its slot start[r] + i, for i < count[r].

    Attributes:
        start, count: (R,) int32; of packed pages multiples of `layout.grain`: a group is written once, as a whole.
        index: (R, width) int32, entries past count[r] are ignored.
        keys: (R, N, key_dim), values: (R, N, value_dim): any strides with contiguous rows; cast to the pages'
            dtype. For packed pages all channels, as the model made them.
        positions: (R, N) int32 (may be expanded).
        scores: (R, N) float32, zero if None.
        log_masses: (R, N) float32, zero if None; only for pages with masses.
    """

    start: Tensor
    count: Tensor
    index: Tensor
    keys: Tensor
    values: Tensor
    positions: Tensor
    scores: Tensor | None = None
    log_masses: Tensor | None = None
