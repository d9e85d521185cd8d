# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Attention of a few queries to every entry, summed over the queries: entries in a tensor, or in pages.

The first kernel walks over splits of the columns for each block of query rows and leaves a maximum and a sum of each;
the second puts these together in a fixed order and walks over the rows for each block of columns, as `column_sums`
does.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from millpond.kernels.args import AttentionShape, WindowSignalArgs
from millpond.kernels.decode_rules import Reduce
from millpond.kernels.gpu.columns import SUMS_TILES, add_weights, load_columns, reduced, tile_for
from millpond.kernels.gpu.common import (
    INF,
    LOG2_E,
    REDUCE_MAX,
    TYPES,
    block_of,
    check,
    dot_type,
    on_its_device,
    page_logs,
    rows_of,
    seen_logits,
    softmax_step,
)
from millpond.kernels.gpu.prefill import masses_of
from millpond.kernels.window_args import PagedWindowArgs

#: Programs of the first kernel that keep a GPU of 132 multiprocessors busy, two on each.
PROGRAMS = 264
#: Splits of a region at most, which every program of the second kernel puts together.
MOST_SPLITS = 32


@triton.jit
def load_rows(
    q, q_h, q_n, q_pos, n_queries, r, row, inside, d, GROUP: tl.constexpr, KEY_DIM: tl.constexpr, DOT: tl.constexpr
):
    """Return queries (ROWS, K) of region r and their positions.

    row = head in the group * n_queries + query.
    """
    head = r * GROUP + row // n_queries
    query = row % n_queries
    at = head * q_h + query.to(tl.int64) * q_n
    mask = inside[:, None] & (d < KEY_DIM)[None, :]
    q_tile = tl.load(q + at[:, None] + d[None, :], mask=mask, other=0.0).to(DOT)
    return q_tile, tl.load(q_pos + query, mask=inside, other=-1)


@triton.jit(do_not_specialize=["n_queries", "n_arenas", "width", "window"])
def window_parts(
    q,
    q_h,
    q_n,
    q_pos,
    n_queries,
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
    lens,
    width,
    part_max,
    part_sum,
    scale,
    softcap,
    window,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    DOT: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_MASSES: tl.constexpr,
    PAGED: tl.constexpr,
    LOG_SLOTS: tl.constexpr,
    LOG_PAGES: tl.constexpr,
    TYPE: tl.constexpr,
):
    """Maximum and sum of the softmax of ROWS query rows over a part of the columns.

    The columns of a region are in SPLITS parts.
    """
    split = tl.program_id(0) % SPLITS
    row = tl.program_id(0) // SPLITS * ROWS + tl.arange(0, ROWS)
    r = tl.program_id(1).to(tl.int64)
    n_rows = GROUP * n_queries
    inside = row < n_rows
    d = tl.arange(0, KEY_BLOCK)
    q_tile, row_pos = load_rows(q, q_h, q_n, q_pos, n_queries, r, row, inside, d, GROUP, KEY_DIM, DOT)
    n = width
    if PAGED:
        n = tl.load(lens + r)
    size = tl.cdiv(tl.cdiv(n, SPLITS), BLOCK) * BLOCK
    begin = split * size
    top = tl.full([ROWS], -INF, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for first in range(begin, tl.minimum(n, begin + size), BLOCK):
        k_tile, position, bias = load_columns(
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
            KEY_DIM,
            BLOCK,
            DOT,
            HAS_MASSES,
            PAGED,
            LOG_SLOTS,
            LOG_PAGES,
            TYPE,
        )
        x = seen_logits(
            q_tile, row_pos, k_tile, position, bias, scale, softcap, window, HAS_CAP, HAS_WINDOW, HAS_MASSES
        )
        top, total, _, _ = softmax_step(x, top, total)
    to = (r * SPLITS + split) * n_rows + row
    tl.store(part_max + to, top, mask=inside)
    tl.store(part_sum + to, total, mask=inside)


@triton.jit(do_not_specialize=["n_queries", "n_arenas", "width", "window"])
def window_shares(
    q,
    q_h,
    q_n,
    q_pos,
    n_queries,
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
    lens,
    width,
    part_max,
    part_sum,
    sink_logits,
    lse,
    sums,
    scale,
    softcap,
    window,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    DOT: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_MASSES: tl.constexpr,
    PAGED: tl.constexpr,
    LOG_SLOTS: tl.constexpr,
    LOG_PAGES: tl.constexpr,
    TYPE: tl.constexpr,
    HAS_SINK: tl.constexpr,
    REDUCE: tl.constexpr,
):
    """Sum the attention of all query rows of a region to BLOCK columns, reduced by group.

    Denominators are those of the SPLITS parts, or `lse` where there are 0.
    """
    first = tl.program_id(0) * BLOCK
    column = first + tl.arange(0, BLOCK)
    r = tl.program_id(1).to(tl.int64)
    n = width
    if PAGED:
        n = tl.load(lens + r)
        if first >= n:
            tl.store(sums + r * width + column, tl.zeros([BLOCK], tl.float32), mask=column < width)
            return
    d = tl.arange(0, KEY_BLOCK)
    k_tile, position, bias = load_columns(
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
        KEY_DIM,
        BLOCK,
        DOT,
        HAS_MASSES,
        PAGED,
        LOG_SLOTS,
        LOG_PAGES,
        TYPE,
    )
    n_rows = GROUP * n_queries
    SETS: tl.constexpr = GROUP if REDUCE == REDUCE_MAX else 1  # heads of a group one by one, or all their rows in a row
    set_rows = n_rows // SETS
    tile = tl.zeros([ROWS, BLOCK], tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for step in range(0, tl.cdiv(set_rows, ROWS) * SETS):
        g = step % SETS
        row = step // SETS * ROWS + tl.arange(0, ROWS)
        inside = row < set_rows
        row += g * set_rows
        q_tile, row_pos = load_rows(q, q_h, q_n, q_pos, n_queries, r, row, inside, d, GROUP, KEY_DIM, DOT)
        if SPLITS == 0:
            norm = tl.load(lse + r * n_rows + row, mask=inside, other=0.0) * LOG2_E
        else:
            split = tl.arange(0, SPLITS)
            at = (r * SPLITS + split)[:, None] * n_rows + row[None, :]
            tops = tl.load(part_max + at, mask=inside[None, :], other=-INF)  # (SPLITS, ROWS)
            parts = tl.load(part_sum + at, mask=inside[None, :], other=0.0)
            top = tl.max(tops, 0)
            if HAS_SINK:
                sink = tl.load(sink_logits + r * GROUP + row // n_queries, mask=inside, other=0.0) * LOG2_E
                top = tl.maximum(top, sink)
            finite = tl.where(top == -INF, 0.0, top)
            bottom = tl.sum(parts * tl.exp2(tops - finite[None, :]), 0)
            if HAS_SINK:
                bottom += tl.exp2(sink - finite)
            norm = finite + tl.log2(tl.where(bottom == 0.0, 1.0, bottom))  # what sees nothing has no share to divide
        x = seen_logits(
            q_tile, row_pos, k_tile, position, bias, scale, softcap, window, HAS_CAP, HAS_WINDOW, HAS_MASSES
        )
        tile, total = add_weights(tile, total, x, norm, g, GROUP, REDUCE)
    tl.store(sums + r * width + column, reduced(tile, total, GROUP, REDUCE), mask=column < width)


class Columns(NamedTuple):
    """Entries of regions as the kernels take them; what one kind does not have is any tensor."""

    k: Tensor
    k_h: int
    k_n: int
    k_pos: Tensor
    pos_h: int
    log_masses: Tensor
    mass_h: int
    bases: Tensor
    n_arenas: int
    table: Tensor
    table_stride: int
    lens: Tensor
    width: int


@on_its_device
def window_signal(args: WindowSignalArgs) -> Tensor:
    k, k_pos = rows_of(args.k), rows_of(args.k_pos)
    check(args.device, args.q.dtype, k.dtype)
    log_masses, mass_h = masses_of(args.log_masses, k_pos)
    keys = k, k.stride(0), k.stride(1), k_pos, k_pos.stride(0), log_masses, mass_h
    columns = Columns(*keys, k_pos, 0, k_pos, 0, k_pos, k.shape[1])
    kind = {"HAS_MASSES": args.log_masses is not None, "PAGED": False, "LOG_SLOTS": 0, "LOG_PAGES": 0}
    return _sums(args.q, args.q_pos, columns, kind, len(k), k.dtype, args.shape, args.reduce, args.lse)


@on_its_device
def window_sums(args: PagedWindowArgs) -> Tensor:
    pages, table, lens = args.regions.parts
    check(args.device, args.q.dtype, pages.dtype)
    if pages.n_arenas == 0:
        return torch.zeros(len(table), args.width, dtype=torch.float32, device=args.device)
    table, none = rows_of(table), args.q_pos
    paged = pages.bases, pages.bases.shape[1], table, table.stride(0), lens.contiguous(), args.width
    columns = Columns(none, 0, 0, none, 0, none, 0, *paged)
    kind = {"HAS_MASSES": pages.masses, "PAGED": True, **page_logs(pages)}
    q = args.q.flatten(0, 1)
    return _sums(q, args.q_pos, columns, kind, len(table), pages.dtype, args.shape, args.reduce, None)


def n_splits(n_regions: int, row_blocks: int, column_blocks: int) -> int:
    """Return into how many parts the columns of a region are split, a power of two."""
    wanted = min(-(-PROGRAMS // (n_regions * row_blocks)), column_blocks, MOST_SPLITS)
    return 1 << (wanted - 1).bit_length()


def _sums(
    q: Tensor,
    q_pos: Tensor,
    columns: Columns,
    kind: dict[str, Any],
    n_regions: int,
    k_dtype: torch.dtype,
    shape: AttentionShape,
    reduce: Reduce,
    lse: Tensor | None,
) -> Tensor:
    """Return (R, width) float32 from queries q (Hq, w, key_dim), launched over `columns`."""
    n_heads, n_queries, key_dim = q.shape
    sums = torch.empty(n_regions, columns.width, dtype=torch.float32, device=q.device)
    if not sums.numel() or not q.numel():
        return sums.zero_()
    q, group = rows_of(q), n_heads // n_regions
    tile = tile_for(SUMS_TILES, block_of(key_dim), q.dtype if q.dtype == k_dtype else torch.float32)
    rows = min(tile.rows, block_of(group * n_queries))
    set_rows = min(tile.rows, block_of(n_queries)) if reduce is Reduce.MAX else rows
    column_blocks, row_blocks = triton.cdiv(columns.width, tile.block), triton.cdiv(group * n_queries, rows)
    splits = 0 if lse is not None else n_splits(n_regions, row_blocks, column_blocks)
    parts = torch.empty(2, n_heads * splits * n_queries, dtype=torch.float32, device=q.device)
    given = q, *q.stride()[:2], q_pos.contiguous(), n_queries, *columns, parts[0], parts[1]
    numbers = float(shape.scale), float(shape.softcap), shape.window
    options = {
        "GROUP": group,
        "KEY_DIM": key_dim,
        "KEY_BLOCK": block_of(key_dim),
        "BLOCK": tile.block,
        "SPLITS": splits,
        "DOT": dot_type(q.dtype, k_dtype),
        "HAS_CAP": shape.softcap != 0.0,
        "HAS_WINDOW": shape.window > 0,
        "TYPE": TYPES[k_dtype],
        **kind,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }
    if lse is None:
        grid = row_blocks * splits, n_regions
        window_parts[grid](*given, *numbers, ROWS=rows, **options)
    sinks = shape.sink_logits
    window_shares[(column_blocks, n_regions)](
        *given,
        sums if sinks is None else sinks.float().contiguous(),
        sums if lse is None else lse.float().contiguous(),
        sums,
        *numbers,
        ROWS=set_rows,
        HAS_SINK=sinks is not None,
        REDUCE=int(reduce),
        **options,
    )
    return sums
