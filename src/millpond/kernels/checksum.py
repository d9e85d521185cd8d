"""CRC-32 of bytes in memory: products without carries where the CPU has them, else zlib; the same numbers."""

from __future__ import annotations

import ctypes
import zlib
from typing import Any

from torch import Tensor

from millpond.kernels.native import library

#: Bytes for which a call of the library is not worth its time.
_FEW = 4096


def crc32(data: Tensor, before: int = 0) -> int:
    """Return the CRC-32 that zlib computes; Python's lock is free meanwhile.

    Args:
        data: (n,) uint8 on the CPU, contiguous.
        before: Checksum of the bytes before; 0 for none.

    Example:
        >>> import torch
        >>> hex(crc32(torch.tensor(list(b"123456789"), dtype=torch.uint8)))
        '0xcbf43926'
    """
    assert data.is_contiguous(), "bytes that follow one another"
    if data.nbytes > _FEW:
        loaded = library.load()
        if loaded is not None:
            function = loaded[1].mp_crc32
            function.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint32]
            function.restype = ctypes.c_int64
            crc = int(function(data.data_ptr(), data.nbytes, before & 0xFFFFFFFF))
            if crc >= 0:
                return crc
    numbers: Any = data.numpy()
    return zlib.crc32(numbers.data, before & 0xFFFFFFFF)
