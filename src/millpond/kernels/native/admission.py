"""Conversion of the tensors of `admit` to its C struct. See `calls`."""

from __future__ import annotations

from struct import Struct

import torch
from torch import Tensor

from millpond.errors import OptionError
from millpond.kernels.args import HeadRuleArgs
from millpond.kernels.native.abi import INT32, _flat, entry_point, pool_numbers

#: the order of fields is that of csrc/common/args.hpp
ADMIT = Struct("=25q").pack


def _numbers(x: Tensor) -> Tensor:
    return x if x.dtype is torch.int64 and x.is_contiguous() else x.to(torch.int64).contiguous()


def admit(args: HeadRuleArgs) -> bool:
    (pages, table, lens), ids = args.regions.parts, args.ids
    if lens.dtype is not INT32 or not lens.is_contiguous():
        raise OptionError("lens is written in place: it must be a contiguous int32 tensor")
    table, local, classes = _flat(table), _flat(args.local), args.classes.contiguous()
    sequences, kinds, seen, quota, most = map(_numbers, (args.sequences, args.kinds, args.seen, args.quota, args.most))
    entry_point("mp_admit")(
        ADMIT(
            pages.bases.data_ptr(),
            pages.bases.shape[1],
            *pool_numbers(pages),
            table.data_ptr(),
            table.stride(0),
            lens.data_ptr(),
            sequences.data_ptr(),
            ids.data_ptr(),
            ids.stride(0),
            classes.data_ptr(),
            len(classes),
            kinds.data_ptr(),
            local.data_ptr(),
            seen.data_ptr(),
            quota.data_ptr(),
            most.data_ptr(),
            len(sequences),
            len(lens) // len(ids),
            args.sinks,
            args.window,
        )
    )
    return True
