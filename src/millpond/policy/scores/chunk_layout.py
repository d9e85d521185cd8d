"""Entries of a head arranged by chunk of text, so that a chunk is one row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from millpond.policy.selection import rank_by_value
from millpond.policy.view import columns_of


@dataclass(frozen=True, slots=True)
class ChunkLayout:
    """Columns of the entries of each chunk.

    Attributes:
        columns: (H, n, width) int64, columns of the view; any column where there is no entry.
        present: (H, n, width) bool, whether there is an entry.
    """

    columns: Tensor
    present: Tensor

    @classmethod
    def of(cls, positions: Tensor, first: int, size: int, n: int) -> ChunkLayout:
        """Return the layout of `n` chunks of `size` positions from `first` on.

        positions (H, N) ascend along N, -1 where there is no entry (all of these come last).
        """
        places = torch.where(positions < 0, torch.iinfo(positions.dtype).max, positions)
        bounds = first + size * torch.arange(n + 1, dtype=positions.dtype, device=positions.device)
        begin = torch.searchsorted(places, bounds.expand(len(places), -1).contiguous())
        counts = begin.diff(dim=1)
        lane = torch.arange(max(int(counts.max()), 1), device=positions.device)
        return cls((begin[:, :-1, None] + lane).clamp(max=positions.shape[1] - 1), lane < counts[..., None])

    def only(self, selected: Tensor) -> ChunkLayout:
        """Return the same chunks without the entries that are not selected (H, N)."""
        return ChunkLayout(self.columns, self.present & self.take(selected))

    def take(self, part: Tensor) -> Tensor:
        """Return a part of entries (H, N) or (H, N, dim) as (H, n, width) or (H, n, width, dim)."""
        return columns_of(part, self.columns.flatten(1)).view(*self.columns.shape, *part.shape[2:])

    def put(self, value: Tensor, into: Tensor) -> Tensor:
        """Return `into` (H, N) with the values (H, n, width) of the entries that are present."""
        spare = into.shape[1]
        columns = torch.where(self.present, self.columns, spare).flatten(1)
        return torch.nn.functional.pad(into, (0, 1)).scatter_(1, columns, value.flatten(1))[:, :spare]

    def ranks(self, value: Tensor) -> Tensor:
        """Return (H, n, width): how many entries of its chunk are better by value (H, n, width).

        Ties go to the newest.
        """
        present = self.present.flatten(0, 1)
        return rank_by_value(value.flatten(0, 1), present, torch.zeros_like(present)).view(value.shape)
