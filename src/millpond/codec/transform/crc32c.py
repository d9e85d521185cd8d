"""CRC-32C (Castagnoli) of many rows of bytes of one length at a time."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from millpond.kernels.backends import native_for
from millpond.kernels.native import transform as native

#: The polynomial, bits in reverse.
_POLYNOMIAL = 0x82F63B78


def _table() -> npt.NDArray[np.uint32]:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(_POLYNOMIAL), table >> 1).astype(np.uint32)
    return table


_TABLE = _table()


def crc32c(rows: npt.NDArray[np.uint8], before: npt.NDArray[np.uint32] | None = None) -> npt.NDArray[np.uint32]:
    """Return the checksum of each row.

    Args:
        rows: (n, bytes).
        before: Checksums (n,) of bytes that come before the rows; None for none.

    Example:
        >>> import numpy as np
        >>> hex(int(crc32c(np.frombuffer(b"123456789", np.uint8)[None])[0]))
        '0xe3069283'
    """
    if native_for(torch.float32, torch.device("cpu")) is not None:
        return native.crc32c(rows, before)
    ones = np.uint32(0xFFFFFFFF)
    crc = np.full(len(rows), ones) if before is None else before ^ ones
    for column in np.ascontiguousarray(rows.T):
        crc = _TABLE[(crc ^ column) & 0xFF] ^ (crc >> 8)
    return crc ^ ones
