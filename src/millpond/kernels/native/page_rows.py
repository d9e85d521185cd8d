"""Structs of `move_rows`, `pack_run` and `unpack_runs` for the C ABI. See `page_rows` and `page_runs`."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from struct import Struct
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from millpond.kernels.args.runs import RunsInBuffer, WantedPages
from millpond.kernels.native import library

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
    rows = [None if one is None else _numbers(one) for one in (source_rows, target_rows)]
    addresses = [0 if one is None else one.ctypes.data for one in rows]
    _entry_point("mp_move_rows")(MOVE(*source, *target, *addresses, n))


def pack(pages: Numbers, ids: Rows, room: Tensor, generation: int) -> int:
    ids = _numbers(ids)
    struct = PACK(*pages, ids.ctypes.data, len(ids), room.data_ptr(), room.nbytes, generation)
    return _entry_point("mp_pack_run")(struct)


def unpack(data: Tensor, runs: RunsInBuffer, pages: Numbers, wanted: WantedPages, first: npt.NDArray[np.int64]) -> int:
    given = [_numbers(one) for one in (*runs, first, *wanted)]
    struct = UNPACK(*pages, data.data_ptr(), *(one.ctypes.data for one in given), len(runs.places))
    return _entry_point("mp_unpack_runs")(struct)
