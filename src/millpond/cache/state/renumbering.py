"""Closed gaps: the entries of a sequence move to consecutive positions, with keys turned to them exactly.

Keys in plain pages lie there after RoPE and are turned; codes of keys that are stored before RoPE stay as they are,
and only the positions of their slots change.
"""

from __future__ import annotations

import torch
from torch import Tensor

from millpond.cache.pages.page_table import PageTable
from millpond.cache.pages.quantized_store import QuantizedStore
from millpond.cache.rope_protocol import RotaryEmbedding
from millpond.cache.state.frames import CacheRelativePositions, stored, turn
from millpond.cache.types import by_position


def positions_of(table: PageTable, sequence: int) -> Tensor:
    """(H, n) int64: positions of codes, then of plain entries, slot by slot; -1 where there is no entry."""
    rows = table.rows(sequence)
    plain = table.plain_positions(rows).long()
    return plain if table.sealed is None else torch.cat([table.sealed.positions(rows).long(), plain], 1)


def least_end(at: Tensor, sinks: int) -> int:
    """The position behind the entries at `at` (H, n), -1 for none, when all gaps in front of them are closed."""
    return sinks + int((at >= sinks).sum(1).max()) if at.numel() else sinks


def consecutive(at: Tensor, sinks: int, end: int) -> Tensor:
    """(H, n) positions in place of `at` (H, n), in the same order: sinks stay, the others end at `end` - 1."""
    moving = at >= sinks
    order = by_position(torch.where(moving, at, -1))  # without an entry last
    ranks = torch.empty_like(order)
    ranks.scatter_(1, order, torch.arange(at.shape[1], device=at.device).expand_as(order))
    return torch.where(moving, end - moving.sum(1, keepdim=True) + ranks, at)


def renumber(
    table: PageTable,
    sequence: int,
    new: Tensor,
    rotation: RotaryEmbedding | None,
    rolling: CacheRelativePositions | None = None,
) -> None:
    """Give the entries of a sequence the positions `new` (H, n), in the order of `positions_of`.

    Args:
        rotation: of the layer's keys; None: they have no rotary position. rolling: where its keys lie now.

    Raises:
        PoolFullError: no room for copies of pages that others hold; nothing was changed.
    """
    dense = stored(table, sequence)
    n_sealed = new.shape[1] - dense.positions.shape[1]
    plain = new[:, n_sealed:]
    at = dense.positions.long()
    old = at.clamp(min=0) if rolling is None else rolling.places(sequence, at)
    numbered = dense._replace(positions=plain.int())
    turn(rotation, table, sequence, numbered, old, plain.clamp(min=0))
    if table.sealed is not None:
        assert isinstance(table.sealed, QuantizedStore), "formats by age are refused where gaps close"
        table.sealed.renumber(table.rows(sequence), new[:, :n_sealed])
    if rolling is not None:
        rolling.restart(table, sequence)
