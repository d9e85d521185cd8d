"""Op set in C++ for the CPU through a plain C ABI, with the functions and meaning of `reference`.

MILLPOND_ISA=baseline|v3|v4|v4fma|v4bf16 chooses an instruction set by force (for tests); the best one runs by default.
Without a compiler at install time there are no libraries: `is_available()` is False and warns once.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch

from millpond.kernels.eager.pages import read_scores
from millpond.kernels.eager.selection import best_columns, shared_counts
from millpond.kernels.native import library
from millpond.kernels.native.abi import attend, decode_rows, decode_shared, window_signal
from millpond.kernels.native.block_sums import block_sums
from millpond.kernels.native.decoder_rows import (
    Behind,
    Layers,
    Linears,
    gate,
    gemm,
    gemm_serves,
    largest,
    norm,
    rotate_,
    widen,
)
from millpond.kernels.native.library import NativeKernelsWarning, use_huge_pages
from millpond.kernels.native.ops import (
    absolute_sums,
    admit,
    decode,
    linear,
    mean_rows,
    merge_slots,
    move_entries,
    nearest,
    newest_alike,
    prefill,
    race,
    read,
    window_sums,
    write,
)
from millpond.kernels.native.pages import read_packed, write_packed
from millpond.kernels.native.transform import decode_pages
from millpond.kernels.native.unit_sums import add_unit_sums


@cache
def _found() -> bool:
    if library.load() is not None:
        return True
    library.warn_missing()
    return False


@torch.compiler.assume_constant_result  # a compiled graph need not trace how a library is found
def is_available() -> bool:
    """Whether native kernels can run here; warns once per process if not."""
    return _found()


def isa() -> str:
    """Return the instruction set in use: baseline, v3, v4, v4fma, v4bf16, neon, or none."""
    loaded = library.load()
    return loaded[0] if loaded is not None else "none"


def read_bandwidth(address: int, n_bytes: int, n_threads: int) -> None:
    """Read memory once on `n_threads` threads at full speed, to be timed."""
    loaded = library.load()
    if loaded is not None:
        loaded[1].mp_read_bandwidth(ctypes.c_void_p(address), ctypes.c_int64(n_bytes), ctypes.c_int(n_threads))
