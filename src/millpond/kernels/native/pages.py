"""Native ops on pages: codes of packed pages, and rows in arenas."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from struct import Struct
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from millpond.errors import NumericsError, OptionError
from millpond.kernels.args import EntryRows, PaddedEntries, RunsInBuffer, WantedPages
from millpond.kernels.eager.packed_pages import no_entries
from millpond.kernels.native import library, structs
from millpond.kernels.packed import groups
from millpond.kernels.packed.layout import Format, Offsets, Side
from millpond.kernels.packed.regions import PackedRegions, Rope
from millpond.kernels.thread_count import thread_count

#: the order of fields is that of csrc/quantized/packed_args.hpp
#: what mp_write_packed reports
NOT_FINITE, TOO_LARGE = 2, 3
_PACKED = Struct("=53q")
PACKED, PACKED_BYTES = _PACKED.pack, _PACKED.size
WRITE = Struct("=25q").pack
READ = Struct("=11q").pack
INT32 = torch.int32


def _int32(x: Tensor, name: str) -> Tensor:
    if x.dtype is not INT32 or not x.is_contiguous():
        raise OptionError(f"{name} of packed regions must be a contiguous int32 tensor")
    return x


def _float_rows(x: Tensor | None, name: str) -> int:
    if x is None:
        return 0
    if x.dtype is not torch.float32 or not x.is_contiguous():
        raise OptionError(f"{name} of packed regions must be a contiguous float32 tensor")
    return x.data_ptr()


def _side(
    side: Side, at: Offsets, dim: int, slots: int, table: tuple[Tensor, Tensor], scales: int, zeros: int
) -> list[int]:
    by_channel = side.by_channel or side.fixed or side.format is Format.FP8
    group = slots if side.fixed or side.format is Format.FP8 else side.group or dim
    return [
        int(side.format),
        int(by_channel),
        group,
        at.codes,
        at.top,
        at.scales,
        at.zeros,
        at.factor_bytes,
        at.means,
        at.extra,
        side.n_extra,
        *(t.data_ptr() for t in table),
        scales,
        zeros,
    ]


def regions_struct(regions: PackedRegions) -> bytes:
    """Return the struct of the regions, made once, and again when their pool has grown."""
    bases: Tensor | None
    struct: bytes
    bases, struct = regions.known.get("struct", (None, b""))
    if bases is not regions.pages.bases:
        struct = _struct(regions)
        regions.known["struct"] = regions.pages.bases, struct
    return struct


def _struct(regions: PackedRegions) -> bytes:
    pages, layout = regions.pages, regions.pages.layout
    if regions.table.dtype is not INT32 or (regions.table.shape[1] and regions.table.stride(1) != 1):
        raise OptionError("table of packed regions must be an int32 tensor with contiguous rows")
    channels, value_channels = (
        0 if t is None else _int32(t, name).data_ptr()
        for t, name in ((regions.channels, "channels"), (regions.value_channels, "value_channels"))
    )
    key_table, value_table = layout.tables
    return PACKED(
        pages.bases.data_ptr(),
        pages.bases.shape[1],
        pages.pages_per_arena,
        layout.slots,
        layout.key_dim,
        layout.value_dim,
        structs.DTYPES[torch.bfloat16],
        int(pages.masses),
        layout.page_bytes,
        *_side(
            layout.key,
            layout.key_offsets,
            layout.key_dim,
            layout.slots,
            key_table,
            _float_rows(regions.key_scales, "key_scales"),
            _float_rows(regions.key_zeros, "key_zeros"),
        ),
        *_side(layout.value, layout.value_offsets, layout.value_dim, layout.slots, value_table, 0, 0),
        regions.table.data_ptr(),
        regions.table.stride(0),
        _int32(regions.lens, "lens").data_ptr(),
        _int32(regions.dead, "dead").data_ptr(),
        channels,
        _float_rows(regions.balance, "balance"),
        value_channels,
        *_rope(regions.rope),
    )


def _rope(rope: Rope | None) -> list[int]:
    if rope is None:
        return [0] * 7
    tables = (rope.pairs, rope.cos, rope.sin, rope.near_cos, rope.near_sin)
    return [len(rope.pairs), rope.positions, *(t.data_ptr() for t in tables)]


def _row_strides(x: Tensor | None) -> tuple[int, int]:
    return (0, 0) if x is None else (x.stride(0), x.stride(1))


def write_packed(regions: PackedRegions, rows: EntryRows) -> None:
    if rows.index.numel() == 0:
        return
    start, count, index = (
        structs.flat_indices(rows.start),
        structs.flat_indices(rows.count),
        structs.flat_indices(rows.index),
    )
    keys, values, positions = structs.readable_rows(rows.keys), structs.readable_rows(rows.values), rows.positions
    scores, log_masses = (t if t is None else t.float() for t in (rows.scores, rows.log_masses))
    if positions.dtype is not INT32:
        raise OptionError(f"positions are int32, not {positions.dtype}")
    failed = structs.entry_point("mp_write_packed")(
        regions_struct(regions)
        + WRITE(
            start.data_ptr(),
            count.data_ptr(),
            index.data_ptr(),
            index.stride(0),
            index.shape[1],
            len(start),
            1 if regions.key_scales is None else len(regions.key_scales),
            keys.data_ptr(),
            values.data_ptr(),
            positions.data_ptr(),
            0 if scores is None else scores.data_ptr(),
            0 if log_masses is None else log_masses.data_ptr(),
            structs.DTYPES[keys.dtype],
            structs.DTYPES[values.dtype],
            *_row_strides(keys),
            *_row_strides(values),
            *_row_strides(positions),
            *_row_strides(scores),
            *_row_strides(log_masses),
            thread_count(),
        )
    )
    if failed == NOT_FINITE:
        raise NumericsError(groups.NOT_FINITE)
    if failed == TOO_LARGE:
        raise NumericsError(groups.TOO_LARGE)
    if failed:
        raise MemoryError("no memory for the work space of the packing kernel")


def read_packed(regions: PackedRegions, width: int, head_dim: int) -> PaddedEntries:
    found = no_entries(regions, width, head_dim)
    if not width or not regions.pages.codes:
        return found
    failed = structs.entry_point("mp_read_packed")(
        regions_struct(regions)
        + READ(
            *(0 if t is None else t.data_ptr() for t in found),
            len(regions.table),
            1 if regions.key_scales is None else len(regions.key_scales),
            width,
            head_dim,
            found.values.shape[2],
            thread_count(),
        )
    )
    if failed:
        raise MemoryError("no memory for the work space of the kernel that reads packed pages")
    return found


#: the order of fields is that of csrc/common/args.hpp
MOVE = Struct("=15q").pack
PACK = Struct("=11q").pack
UNPACK = Struct("=15q").pack

Numbers = tuple[int, ...]
Rows = npt.NDArray[np.integer[Any]]


@cache
def _entry_point(name: str) -> Callable[[bytes], int]:
    loaded = library.load()
    assert loaded is not None, "whoever calls has seen that there is one"
    function: ctypes._NamedFuncPointer = getattr(loaded[1], name)
    function.argtypes, function.restype = [ctypes.c_char_p], ctypes.c_int64
    return function


def _numbers(rows: Rows) -> npt.NDArray[np.int64]:
    return np.ascontiguousarray(rows, dtype=np.int64)


def move(source: Numbers, source_rows: Rows | None, target: Numbers, target_rows: Rows | None, n: int) -> None:
    rows = [None if array is None else _numbers(array) for array in (source_rows, target_rows)]
    addresses = [0 if array is None else array.ctypes.data for array in rows]
    _entry_point("mp_move_rows")(MOVE(*source, *target, *addresses, n))


def pack(pages: Numbers, ids: Rows, buffer: Tensor, generation: int) -> int:
    ids = _numbers(ids)
    struct = PACK(*pages, ids.ctypes.data, len(ids), buffer.data_ptr(), buffer.nbytes, generation)
    return _entry_point("mp_pack_run")(struct)


def unpack(data: Tensor, runs: RunsInBuffer, pages: Numbers, wanted: WantedPages, first: npt.NDArray[np.int64]) -> int:
    arrays = [_numbers(array) for array in (*runs, first, *wanted)]
    struct = UNPACK(*pages, data.data_ptr(), *(array.ctypes.data for array in arrays), len(runs.places))
    return _entry_point("mp_unpack_runs")(struct)
