"""Call of the native sums of attention by units, see `millpond.kernels.unit_sums`."""

from __future__ import annotations

from struct import Struct

import torch

from millpond.kernels.native.structs import DTYPES, readable_rows, run
from millpond.kernels.thread_count import thread_count
from millpond.kernels.unit_sums import UnitSumsArgs

#: the order of fields is that of csrc/common/args.hpp
_UNIT_SUMS = Struct("=23q2d").pack


def add_unit_sums(args: UnitSumsArgs) -> None:
    """Run `add_unit_sums`."""
    q, keys, lse, sums, shape = readable_rows(args.q), readable_rows(args.keys), args.lse, args.sums, args.shape
    assert lse.dtype is sums.dtype is torch.float32, "sums and denominators are float32"
    assert sums.stride(1) == 1, "sums of a head lie side by side"
    assert sums.shape[1] >= keys.shape[1] - args.first, "there is a sum for each token"
    if not q.shape[1]:
        return
    struct = _UNIT_SUMS(
        q.data_ptr(),
        keys.data_ptr(),
        lse.data_ptr(),
        sums.data_ptr(),
        DTYPES[q.dtype],
        DTYPES[keys.dtype],
        *q.stride()[:2],
        *keys.stride()[:2],
        *lse.stride(),
        sums.stride(0),
        len(q),
        len(keys),
        q.shape[1],
        *keys.shape[1:],
        args.unit,
        args.step,
        args.least,
        shape.window or 0,
        thread_count(),
        shape.scale,
        shape.softcap,
    )
    run("mp_unit_sums", "the sums of attention by units", struct)
