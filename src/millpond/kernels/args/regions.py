"""The regions that an op reads or writes, in general and at a decoding step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from millpond.kernels.args.shape import AttentionShape
from millpond.kernels.decode_rules import DecodeRule
from millpond.kernels.packed.regions import PackedRegions
from millpond.kernels.pages import PageArrays


@dataclass(frozen=True, slots=True)
class PageRegions:
    """What R regions hold in plain pages, the entries of region r in its slots 0 .. lens[r] - 1.

    Attributes:
        pages: the memory of the pool.
        table: (R, n) int32 page ids.
        lens: (R,) int32 slots in use.
    """

    pages: PageArrays
    table: Tensor
    lens: Tensor

    @property
    def device(self) -> torch.device:
        return self.table.device

    @property
    def parts(self) -> tuple[PageArrays, Tensor, Tensor]:
        """Pages, table and lens."""
        return self.pages, self.table, self.lens


@dataclass(frozen=True, slots=True)
class StepRegions:
    """The R = S * Hkv regions of one layer at a decoding step of S sequences, and the rules of the step.

    Attributes:
        plain: what lies in plain pages; its memory and `lens` are written. A page for slot lens[r] must be there
            wherever a region may grow.
        caps: (R,) int32, most entries a region may hold; at least 1. Entries of both parts count, tombstones do not.
        recent: (R,) int32, how many of the newest positions are protected.
        q_pos: (S,) int32, the position of the new token in its own text; -1: this sequence takes no part (its output
            is zero, its lse -inf, nothing is stored).
        rule: what is scored and what is evicted.
        shape: of the attention.
        packed: what lies in packed pages; None: nothing. Its side arrays and `dead` are written; codes never.
        kept: (S, n, 2) int32, spans [begin, end) of positions that never leave, empty ones at the end; None: none.
        least: (S, m, 3) int32, disjoint spans [begin, end) of positions and the fewest entries of each that stay in
            every region, at most `MOST_LEAST`; where a region holds no more, none of them leaves. None: none.
    """

    plain: PageRegions
    caps: Tensor
    recent: Tensor
    q_pos: Tensor
    rule: DecodeRule
    shape: AttentionShape
    packed: PackedRegions | None = None
    kept: Tensor | None = None
    least: Tensor | None = None
