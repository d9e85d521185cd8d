"""Safetensors in memory: tensors and a header of texts as one buffer, read with all sizes checked before use."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from millpond.errors import DataError
from millpond.hf.document import digest_of

#: Limits of a header in bytes, of the tensors that it names, and of the axes of one.
MOST_HEADER, MOST_TENSORS, MOST_AXES = 2**26, 2**20, 8
#: What tensors may consist of, by the names of the safetensors format.
DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
_CHECKSUM = "checksum"


def pack(about: Mapping[str, str], tensors: Mapping[str, Tensor]) -> bytes:
    """One buffer of tensors on the host, any shapes, and of texts; a SHA-256 of both is added to the texts."""
    return save(dict(tensors), {**about, _CHECKSUM: digest_of(about, tensors)})


def unpack(data: bytes | bytearray | memoryview) -> tuple[dict[str, str], dict[str, Tensor]]:
    """The texts and the tensors of a buffer of `pack`; the tensors share one copy of it.

    Raises:
        DataError: the buffer is cut off, is no such buffer, or does not match its checksum. No more memory was taken
            than the buffer has.
    """
    view = memoryview(data).cast("B")
    entries, begin = _header(view)
    about = entries.pop("__metadata__", None)
    if not isinstance(about, dict) or not all(isinstance(text, str) for text in about.values()):
        raise _broken("its header has no texts")
    if len(entries) > MOST_TENSORS:
        raise _broken(f"it names {len(entries):,} tensors, and may name {MOST_TENSORS:,}")
    payload = bytearray(view[begin:])
    tensors = {name: _tensor(name, entry, payload) for name, entry in entries.items()}
    if sum(t.nbytes for t in tensors.values()) != len(payload):
        raise _broken(f"it has {len(payload):,} bytes of tensors, and they do not fill them")
    checksum = about.pop(_CHECKSUM, None)
    if checksum != digest_of(about, tensors):
        raise _broken("its checksum differs, so it is not as it was written")
    return about, tensors


def _header(view: memoryview) -> tuple[dict[str, Any], int]:
    """The header, and where the tensors begin."""
    n = int.from_bytes(view[:8], "little")
    if len(view) < 8 or not 2 <= n <= min(MOST_HEADER, len(view) - 8):
        raise _broken(f"it has {len(view):,} bytes, and a header of {n:,} does not fit")
    written = bytes(view[8 : 8 + n])
    try:
        found = json.loads(written)
        again = json.dumps(found, separators=(",", ":"), ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        raise _broken("its header is no JSON") from None
    if not isinstance(found, dict):
        raise _broken("its header is no object")
    if again.ljust(n) != written:  # so that the checksum covers each byte of it
        raise _broken("its header is not as `pack` writes it")
    return found, 8 + n


def _tensor(name: str, entry: Any, payload: bytearray) -> Tensor:
    """One tensor as a view of the payload."""
    try:
        dtype, shape, (begin, end) = DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
        numbers = [begin, end, *shape]
    except (KeyError, TypeError, ValueError):
        raise _broken(f"tensor {name[:80]!r} has no type, shape and place") from None
    if len(shape) > MOST_AXES or not all(type(number) is int and number >= 0 for number in numbers):
        raise _broken(f"tensor {name[:80]!r} has the shape {str(shape)[:80]}")
    n, size = math.prod(shape), dtype.itemsize
    if not begin <= end <= len(payload) or begin % size or n * size != end - begin:
        raise _broken(f"tensor {name[:80]!r} of shape {str(shape)[:80]} does not lie in {end - begin:,} of its bytes")
    if not n:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(payload, dtype=dtype, count=n, offset=begin).view(shape)


def _broken(why: str) -> DataError:
    return DataError(f"the buffer of a request cannot be read: {why}; send the request once more")
