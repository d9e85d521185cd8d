"""Calls of the native kernels of the codec `transform`, and of its checksum."""

from __future__ import annotations

from struct import Struct

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from millpond.errors import OptionError
from millpond.kernels.native.structs import DTYPES, address_of, entry_point, readable_rows, run
from millpond.kernels.thread_count import thread_count
from millpond.kernels.transform_args import SET_LEVELS, TOKENS, BackTransforms, CodedDimensions

#: the order of fields is that of csrc/transform/transform_args.hpp
_CODED = Struct("=6q").pack
_BACK = Struct("=5q").pack
_DECODE = Struct("=5q").pack
_NUMBERS = Struct("=3q").pack
_ENCODE = Struct("=7q").pack
_PROJECT = Struct("=12q").pack
_CHECK = Struct("=7q").pack
#: the order of fields is that of csrc/common/args.hpp
_CHECKSUM = Struct("=6q").pack

_FLOATS = torch.float32
#: Floats of a line of the cache.
_LINE = 16


def _coded_struct(coded: CodedDimensions) -> bytes:
    """Return the C struct; it keeps no tensor."""
    shift, scale, bits, levels, sets = coded
    rows = len(bits)
    _need(shift, _FLOATS, rows)
    _need(scale, _FLOATS, rows)
    _need(bits, torch.uint8, rows)
    _need(levels, _FLOATS, len(levels), SET_LEVELS)
    if sets is not None:
        _need(sets, torch.int32, rows)
    addresses = (shift.data_ptr(), scale.data_ptr(), bits.data_ptr(), levels.data_ptr(), address_of(sets))
    return _CODED(*addresses, rows)


def _need(tensor: Tensor, dtype: torch.dtype, *shape: int) -> None:
    if not (tensor.dtype is dtype and tensor.is_cpu and tensor.shape == shape and tensor.is_contiguous()):
        raise OptionError(
            f"kernels of the codec transform take {shape} {dtype}, contiguous and on the CPU, not "
            f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"
        )


def decode_pages(sides: BackTransforms, pages: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the keys and values of checked pages (P, bytes), (32 P, d) each."""
    outs, structs = [], []
    for coded, mean, matrix in sides:
        d = len(mean)
        _need(mean, _FLOATS, d)
        _need(matrix, _FLOATS, len(coded.bits), d)
        outs.append(torch.empty((len(pages) * TOKENS, d), dtype=dtype))
        structs.append(_coded_struct(coded) + _BACK(mean.data_ptr(), matrix.data_ptr(), outs[-1].data_ptr(), d, d))
    pages = pages.cpu().contiguous()
    call = _DECODE(*_pages(pages), DTYPES[dtype], thread_count())
    run("mp_decode_pages", "decoding", b"".join(structs) + call)
    return outs[0], outs[1]


def encode_pages(
    sides: tuple[CodedDimensions, CodedDimensions],
    numbers: tuple[Tensor, Tensor],
    page_bytes: int,
    address: tuple[int, int, int],
) -> Tensor:
    """Return pages (P, page_bytes) of numbers (32 P, rows) float32.

    Args:
        sides: Of keys and values.
        numbers: Theirs.
        page_bytes: Of a page with these bits.
        address: Unit, layer, and number of the first page.
    """
    n_pages = len(numbers[0]) // TOKENS
    structs = []
    for side, z in zip(sides, numbers, strict=True):
        if z.dtype is not _FLOATS or z.shape != (n_pages * TOKENS, len(side.bits)):
            raise OptionError(f"{tuple(z.shape)} {z.dtype}: pages are made of 32 tokens with {len(side.bits)} float32")
        structs.append(_coded_struct(side) + _NUMBERS(z.data_ptr(), *z.stride()))
    pages = torch.empty((n_pages, page_bytes), dtype=torch.uint8)
    run("mp_encode_pages", "encoding", b"".join(structs) + _ENCODE(*_pages(pages), *address, thread_count()))
    return pages


def encode_tokens(
    sides: tuple[CodedDimensions, CodedDimensions],
    bases: tuple[tuple[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]],
    page_bytes: int,
    address: tuple[int, int, int],
) -> Tensor:
    """Return pages of tokens: `encode_pages` of what `project` gives.

    Args:
        sides: Of keys and values.
        bases: Tokens (32 P, d), mean and matrix of `project`, for each.
        page_bytes: Of a page with these bits.
        address: Unit, layer, and number of the first page.
    """
    n_pages = len(bases[0][0]) // TOKENS
    read = [(readable_rows(x), mean, matrix) for x, mean, matrix in bases]
    tokens = [_project_struct(*basis, None, 0, 0) for basis in read]
    if any(len(x) != n_pages * TOKENS for x, _, _ in read):
        raise OptionError(f"{[len(x) for x, _, _ in read]} keys and values: pages are made of 32 tokens")
    coded = [_coded_struct(side) + _NUMBERS(0, 0, 0) for side in sides]
    pages = torch.empty((n_pages, page_bytes), dtype=torch.uint8)
    call = _ENCODE(*_pages(pages), *address, thread_count())
    run("mp_encode_tokens", "encoding", b"".join(tokens) + b"".join(coded) + call)
    return pages


def _pages(pages: Tensor) -> tuple[int, int, int]:
    return pages.data_ptr(), *pages.shape


def project(x: Tensor, mean: Tensor, matrix: Tensor, bits: Tensor | None = None) -> Tensor:
    """Return matrix (x - mean), (n, rows) float32 that lies by dimension, for x (n, d).

    Where bits (rows,) uint8 are given, a dimension without any is 0.
    """
    x, rows = readable_rows(x), len(matrix)
    n_lines = -(-len(x) // _LINE) | 1  # odd, so that dimensions do not compete for the same places of the cache
    z = (torch.empty if bits is None else torch.zeros)((rows, n_lines * _LINE))[:, : len(x)]
    if bits is not None:
        _need(bits, torch.uint8, rows)
    run("mp_project", "encoding", _project_struct(x, mean, matrix, bits, z.data_ptr(), z.stride(0)))
    return z.T


def _project_struct(x: Tensor, mean: Tensor, matrix: Tensor, bits: Tensor | None, z: int, z_row: int) -> bytes:
    rows, d = matrix.shape
    _need(mean, _FLOATS, d)
    _need(matrix, _FLOATS, rows, d)
    if x.ndim != 2 or x.shape[1] != d:
        raise OptionError(f"{tuple(x.shape)}: this transform is of tokens with {d} numbers")
    source = (x.data_ptr(), DTYPES[x.dtype], x.stride(0))
    addresses = (mean.data_ptr(), matrix.data_ptr(), address_of(bits), z)
    return _PROJECT(*source, *addresses, z_row, len(x), rows, d, thread_count())


def check_pages(pages: Tensor, address: tuple[int, int, int]) -> tuple[int, int]:
    """Return the first damaged page of (P, bytes) and the first that belongs elsewhere.

    Each is -1 for none. The address is unit, layer, and number of the first page.
    """
    found = np.empty(2, dtype=np.int64)
    entry_point("mp_check_pages")(_CHECK(*_pages(pages), *address, found.ctypes.data))
    return int(found[0]), int(found[1])


def crc32c(rows: npt.NDArray[np.uint8], before: npt.NDArray[np.uint32] | None) -> npt.NDArray[np.uint32]:
    """Return the CRC-32C of each of (n, bytes), behind those of checksums `before` (n,)."""
    n, n_bytes = rows.shape
    rows = rows if rows.strides[1] == 1 else np.ascontiguousarray(rows)
    found = np.empty(n, dtype=np.uint32)
    previous = 0 if before is None else before.ctypes.data
    call = _CHECKSUM(rows.ctypes.data, previous, found.ctypes.data, n, n_bytes, rows.strides[0])
    entry_point("mp_crc32c")(call)
    return found
