# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Blocks of columns: their sizes, their entries in a tensor or in pages, and the attention that rows pay to them."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from millpond.kernels.gpu.common import INF, KEYS, LOG2_E, LOG_MASSES, POSITIONS, REDUCE_MAX, REDUCE_MEAN, tile_rows


@triton.jit
def load_columns(
    k,
    k_h,
    k_n,
    k_pos,
    pos_h,
    log_masses,
    mass_h,
    bases,
    n_arenas,
    table,
    table_stride,
    r,
    first,
    n,
    d,
    KEY_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    DOT: tl.constexpr,
    HAS_MASSES: tl.constexpr,
    PAGED: tl.constexpr,
    LOG_SLOTS: tl.constexpr,
    LOG_PAGES: tl.constexpr,
    TYPE: tl.constexpr,
):
    """Return keys (K, BLOCK), positions and log masses in base 2 of a block of columns.

    They are first .. first + BLOCK - 1 of region r. Columns from n on have no entry: position -1. `first` is less than
    n.
    """
    column = first + tl.arange(0, BLOCK)
    ok = column < n
    table_row = table + r * table_stride
    if PAGED:
        key_at = tile_rows(
            bases, n_arenas, KEYS, table_row, first, column, ok, LOG_SLOTS, LOG_PAGES, BLOCK, KEY_DIM, TYPE
        )
        pos_at = tile_rows(
            bases, n_arenas, POSITIONS, table_row, first, column, ok, LOG_SLOTS, LOG_PAGES, BLOCK, 1, tl.int32
        )
    else:
        key_at = k + r * k_h + column.to(tl.int64) * k_n
        pos_at = k_pos + r * pos_h + column
    k_tile = tl.load(key_at[None, :] + d[:, None], mask=ok[None, :] & (d < KEY_DIM)[:, None], other=0.0).to(DOT)
    position = tl.load(pos_at, mask=ok, other=-1)
    bias = tl.zeros([BLOCK], tl.float32)
    if HAS_MASSES:
        if PAGED:
            mass_at = tile_rows(
                bases, n_arenas, LOG_MASSES, table_row, first, column, ok, LOG_SLOTS, LOG_PAGES, BLOCK, 1, tl.float32
            )
        else:
            mass_at = log_masses + r * mass_h + column
        bias = tl.load(mass_at, mask=ok, other=0.0) * LOG2_E
    return k_tile, position, bias


@triton.jit
def add_weights(tile, total, x, norm, g, GROUP: tl.constexpr, REDUCE: tl.constexpr):
    """Add the shares of rows of query head g of a group to the state of a sum.

    That is tile (ROWS, BLOCK) and total (BLOCK,). The logits are x (ROWS, BLOCK), -inf where hidden, and the logs of
    the denominators norm (ROWS,), both in base 2. For a maximum the heads of a group come one after another with the
    same rows.
    """
    p = tl.where(x == -INF, 0.0, tl.exp2(x - norm[:, None]))
    if REDUCE == REDUCE_MAX:
        tile = tl.where(g == 0, p, tl.maximum(tile, p))
        total += tl.where(g == GROUP - 1, tl.sum(tile, 0), 0.0)
    else:
        tile += p
    return tile, total


@triton.jit
def reduced(tile, total, GROUP: tl.constexpr, REDUCE: tl.constexpr):
    """Return the sums (BLOCK,) of what `add_weights` has added up."""
    if REDUCE != REDUCE_MAX:
        total = tl.sum(tile, 0)
    if REDUCE == REDUCE_MEAN:
        total = total * (1.0 / GROUP)
    return total


class Tile(NamedTuple):
    """Sizes that change speed and not meaning."""

    rows: int
    block: int
    warps: int
    stages: int


#: Of kernels that sum by column: of heads of at most 128 channels, of at most 256 and of wider ones; then of float32,
#: which runs without tensor cores.
SUMS_TILES = (Tile(64, 128, 8, 3), Tile(32, 64, 4, 2), Tile(16, 16, 4, 1)), Tile(32, 32, 8, 1)


def tile_for(tiles: tuple[tuple[Tile, Tile, Tile], Tile], dim: int, dtype: torch.dtype) -> Tile:
    """Return the tile of a kernel for heads of width `dim` (a power of two)."""
    (narrow, wide, widest), in_float32 = tiles
    if dim > 256:
        return widest
    if dtype == torch.float32:
        return in_float32
    return narrow if dim <= 128 else wide
