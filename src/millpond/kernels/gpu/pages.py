# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Ragged copies into pages and out of them, one program per run of slots of a region."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from millpond.kernels.args import EntryRows, PaddedEntries, PageRegions
from millpond.kernels.gpu.common import (
    KEYS,
    LOG_MASSES,
    POSITIONS,
    SCORES,
    TYPES,
    VALUES,
    block_of,
    check,
    locate,
    on_its_device,
    page_logs,
    rows_of,
    slot_rows,
)

BLOCK = 32  #: slots per program
SCORE_BLOCK = 512  #: the same where only scores are read


@triton.jit
def _copy_in(source, row, target, ok, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Copy rows `row` of source (row pointers) to target (row pointers)."""
    lane = tl.arange(0, WIDTH)
    both = ok[:, None] & (lane < DIM)[None, :]
    rows = tl.load((source + row)[:, None] + lane[None, :], mask=both, other=0)
    tl.store(target[:, None] + lane[None, :], rows, mask=both)


@triton.jit
def _copy_out(source, target, ok, inside, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Copy rows of source where ok, zeros elsewhere, to the rows of target that are `inside`."""
    lane = tl.arange(0, WIDTH)
    within = (lane < DIM)[None, :]
    rows = tl.load(source[:, None] + lane[None, :], mask=ok[:, None] & within, other=0)
    tl.store(target[:, None] + lane[None, :], rows, mask=inside[:, None] & within)


@triton.jit(do_not_specialize=["n_arenas", "width"])
def _write(
    bases,
    n_arenas,
    table,
    table_stride,
    start,
    count,
    index,
    width,
    keys,
    values,
    positions,
    scores,
    masses,
    keys_r,
    keys_n,
    values_r,
    values_n,
    positions_r,
    positions_n,
    scores_r,
    scores_n,
    masses_r,
    masses_n,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    LOG_SLOTS: tl.constexpr,
    LOG_PAGES: tl.constexpr,
    TYPE: tl.constexpr,
    HAS_SCORES: tl.constexpr,
    KEEPS_MASSES: tl.constexpr,
    HAS_MASSES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    r = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    n = tl.load(count + r)
    if first >= n:
        return
    lane = first + tl.arange(0, BLOCK)
    ok = (lane < n) & (lane < width)
    row = tl.load(index + r * width + lane, mask=ok, other=0).to(tl.int64)
    arena, place = locate(table + r * table_stride, tl.load(start + r) + lane, ok, LOG_SLOTS, LOG_PAGES)
    at = slot_rows(bases, n_arenas, KEYS, arena, place, ok, KEY_DIM, TYPE)
    _copy_in(keys + r * keys_r, row * keys_n, at, ok, KEY_DIM, KEY_BLOCK)
    at = slot_rows(bases, n_arenas, VALUES, arena, place, ok, VALUE_DIM, TYPE)
    _copy_in(values + r * values_r, row * values_n, at, ok, VALUE_DIM, VALUE_BLOCK)
    at = slot_rows(bases, n_arenas, POSITIONS, arena, place, ok, 1, tl.int32)
    tl.store(at, tl.load(positions + r * positions_r + row * positions_n, mask=ok, other=0), mask=ok)
    at = slot_rows(bases, n_arenas, SCORES, arena, place, ok, 1, tl.float32)
    if HAS_SCORES:
        tl.store(at, tl.load(scores + r * scores_r + row * scores_n, mask=ok, other=0.0), mask=ok)
    else:
        tl.store(at, tl.zeros([BLOCK], tl.float32), mask=ok)
    if KEEPS_MASSES:
        at = slot_rows(bases, n_arenas, LOG_MASSES, arena, place, ok, 1, tl.float32)
        if HAS_MASSES:
            tl.store(at, tl.load(masses + r * masses_r + row * masses_n, mask=ok, other=0.0), mask=ok)
        else:
            tl.store(at, tl.zeros([BLOCK], tl.float32), mask=ok)


@triton.jit(do_not_specialize=["n_arenas", "width"])
def _read(
    bases,
    n_arenas,
    table,
    table_stride,
    lens,
    width,
    keys,
    values,
    positions,
    scores,
    masses,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    LOG_SLOTS: tl.constexpr,
    LOG_PAGES: tl.constexpr,
    TYPE: tl.constexpr,
    KEEPS_MASSES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    r = tl.program_id(0).to(tl.int64)
    slot = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = slot < width
    ok = inside & (slot < tl.load(lens + r))
    arena, place = locate(table + r * table_stride, slot, ok, LOG_SLOTS, LOG_PAGES)
    to = r * width + slot
    at = slot_rows(bases, n_arenas, KEYS, arena, place, ok, KEY_DIM, TYPE)
    _copy_out(at, keys + to * KEY_DIM, ok, inside, KEY_DIM, KEY_BLOCK)
    at = slot_rows(bases, n_arenas, VALUES, arena, place, ok, VALUE_DIM, TYPE)
    _copy_out(at, values + to * VALUE_DIM, ok, inside, VALUE_DIM, VALUE_BLOCK)
    at = slot_rows(bases, n_arenas, POSITIONS, arena, place, ok, 1, tl.int32)
    tl.store(positions + to, tl.load(at, mask=ok, other=-1), mask=inside)
    at = slot_rows(bases, n_arenas, SCORES, arena, place, ok, 1, tl.float32)
    tl.store(scores + to, tl.load(at, mask=ok, other=0.0), mask=inside)
    if KEEPS_MASSES:
        at = slot_rows(bases, n_arenas, LOG_MASSES, arena, place, ok, 1, tl.float32)
        tl.store(masses + to, tl.load(at, mask=ok, other=0.0), mask=inside)


@triton.jit(do_not_specialize=["n_arenas", "width"])
def _read_scores(
    bases,
    n_arenas,
    table,
    table_stride,
    lens,
    width,
    scores,
    LOG_SLOTS: tl.constexpr,
    LOG_PAGES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    r = tl.program_id(0).to(tl.int64)
    slot = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = slot < width
    ok = inside & (slot < tl.load(lens + r))
    arena, place = locate(table + r * table_stride, slot, ok, LOG_SLOTS, LOG_PAGES)
    at = slot_rows(bases, n_arenas, SCORES, arena, place, ok, 1, tl.float32)
    tl.store(scores + r * width + slot, tl.load(at, mask=ok, other=0.0), mask=inside)


@on_its_device
def write(regions: PageRegions, rows: EntryRows) -> None:
    pages, table, index, positions = regions.pages, regions.table, rows.index, rows.positions
    scores, log_masses = rows.scores, rows.log_masses
    check(table.device, pages.dtype)
    n_regions, width = index.shape
    if n_regions == 0 or width == 0 or pages.n_arenas == 0:
        return
    # the device rounds to nearest even as torch does, the interpreter truncates: cast before the kernel
    keys, values = rows_of(rows.keys.to(pages.dtype)), rows_of(rows.values.to(pages.dtype))
    table = rows_of(table)
    score_strides = scores.stride() if scores is not None else (0, 0)
    mass_strides = log_masses.stride() if log_masses is not None else (0, 0)
    _write[(n_regions, triton.cdiv(width, BLOCK))](
        pages.bases,
        pages.bases.shape[1],
        table,
        table.stride(0),
        rows.start.contiguous(),
        rows.count.contiguous(),
        index.contiguous(),
        width,
        keys,
        values,
        positions,
        scores if scores is not None else positions,
        log_masses if log_masses is not None else positions,
        *keys.stride()[:2],
        *values.stride()[:2],
        *positions.stride(),
        *score_strides,
        *mass_strides,
        KEY_DIM=pages.key_dim,
        VALUE_DIM=pages.value_dim,
        KEY_BLOCK=block_of(pages.key_dim),
        VALUE_BLOCK=block_of(pages.value_dim),
        TYPE=TYPES[pages.dtype],
        HAS_SCORES=scores is not None,
        KEEPS_MASSES=pages.masses,
        HAS_MASSES=log_masses is not None,
        BLOCK=BLOCK,
        **page_logs(pages),
    )


@on_its_device
def read(regions: PageRegions, width: int) -> PaddedEntries:
    pages, table, lens = regions.parts
    check(table.device, pages.dtype)
    n, device = table.shape[0], table.device
    keys = torch.empty(n, width, pages.key_dim, dtype=pages.dtype, device=device)
    values = torch.empty(n, width, pages.value_dim, dtype=pages.dtype, device=device)
    positions = torch.empty(n, width, dtype=torch.int32, device=device)
    scores = torch.empty(n, width, dtype=torch.float32, device=device)
    log_masses = torch.empty_like(scores) if pages.masses else None
    if pages.n_arenas == 0:
        empty = log_masses.zero_() if log_masses is not None else None
        return PaddedEntries(keys.zero_(), values.zero_(), positions.fill_(-1), scores.zero_(), empty)
    if n and width:
        table = rows_of(table)
        _read[(n, triton.cdiv(width, BLOCK))](
            pages.bases,
            pages.bases.shape[1],
            table,
            table.stride(0),
            lens.contiguous(),
            width,
            keys,
            values,
            positions,
            scores,
            log_masses if log_masses is not None else scores,
            KEY_DIM=pages.key_dim,
            VALUE_DIM=pages.value_dim,
            KEY_BLOCK=block_of(pages.key_dim),
            VALUE_BLOCK=block_of(pages.value_dim),
            TYPE=TYPES[pages.dtype],
            KEEPS_MASSES=pages.masses,
            BLOCK=BLOCK,
            **page_logs(pages),
        )
    return PaddedEntries(keys, values, positions, scores, log_masses)


@on_its_device
def read_scores(regions: PageRegions, width: int) -> Tensor:
    pages, table, lens = regions.parts
    check(table.device, pages.dtype)
    scores = torch.empty(table.shape[0], width, dtype=torch.float32, device=table.device)
    if pages.n_arenas == 0:
        return scores.zero_()
    if scores.numel():
        table = rows_of(table)
        _read_scores[(table.shape[0], triton.cdiv(width, SCORE_BLOCK))](
            pages.bases,
            pages.bases.shape[1],
            table,
            table.stride(0),
            lens.contiguous(),
            width,
            scores,
            BLOCK=SCORE_BLOCK,
            **page_logs(pages),
        )
    return scores
