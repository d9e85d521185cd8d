"""Parts of the C structs of the native kernels: entry points, dtypes, and the numbers of tensors, pools and rules."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from millpond.errors import OptionError
from millpond.kernels.decode_rules import DecodeRule
from millpond.kernels.native import library
from millpond.kernels.pages import PageArrays

DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
TORCH_DTYPES = tuple(DTYPES)
INT32 = torch.int32

Call = Callable[[bytes], int]


@cache
def entry_point(name: str) -> Call:
    """Return the C function of that name, taking one packed struct."""
    loaded = library.load()
    if loaded is None:
        raise OptionError("this install has no native kernels; reinstall millpond with a C++ compiler")
    function: ctypes._NamedFuncPointer = getattr(loaded[1], name)
    function.argtypes, function.restype = [ctypes.c_char_p], ctypes.c_int
    return function


def run(name: str, purpose: str, struct: bytes) -> None:
    """Call the C function of that name.

    Raises:
        MemoryError: there is no work space for its purpose.
    """
    if entry_point(name)(struct):
        raise MemoryError(f"no memory for the work space of {purpose}")


def readable_rows(x: Tensor) -> Tensor:
    """Return the tensor with contiguous rows in a dtype that the kernels read."""
    x = x if x.dtype in DTYPES else x.float()
    return x if x.stride(-1) == 1 else x.contiguous()


def flat_indices(x: Tensor) -> Tensor:
    """Return an index tensor with contiguous int32 rows."""
    if x.dtype is not INT32:
        raise OptionError(f"index tensors of the kernels are int32, not {x.dtype}")
    return x if x.stride(-1) == 1 else x.contiguous()


def address_of(x: Tensor | None) -> int:
    """Return the address of a tensor's numbers; 0 for none."""
    return 0 if x is None else x.data_ptr()


def shared_rows(x: Tensor | None) -> tuple[int, int]:
    """Return address and stride of rows, one per KV head or one for all."""
    return (0, 0) if x is None else (x.data_ptr(), x.stride(0) if len(x) > 1 else 0)


def pool_numbers(pages: PageArrays) -> list[int]:
    """Return the numbers of a pool as the schemas take them, its addresses apart."""
    dtype = DTYPES[pages.dtype]
    return [pages.pages_per_arena, pages.slots, pages.key_dim, pages.value_dim, dtype, int(pages.masses)]


def rule_numbers(rule: DecodeRule) -> list[int]:
    """Return the numbers of a rule as the schemas take them, its decay apart."""
    kinds, spacing = [int(rule.signal), int(rule.reduce), int(rule.evict)], rule.spacing
    return [*kinds, rule.sinks, int(rule.shared), rule.seed & 0xFFFFFFFF, spacing.width, spacing.shift, spacing.stride]
