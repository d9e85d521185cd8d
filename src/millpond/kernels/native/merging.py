"""Conversion of the tensors of `merge_slots`, `nearest` and `mean_rows` to C structs and back. See `calls`."""

from __future__ import annotations

from struct import Struct

import torch
from torch import Tensor

from millpond.errors import OptionError
from millpond.kernels.args import MergeArgs
from millpond.kernels.native.abi import DTYPES, INT32, _flat, _rows, entry_point, pool_numbers
from millpond.kernels.thread_count import thread_count

#: the order of fields is that of csrc/common/args.hpp
MERGE = Struct("=31q4d").pack
NEAREST = Struct("=17qd").pack
MEAN = Struct("=13q").pack


def merge_slots(args: MergeArgs) -> None:
    (pages, table, lens), memory, leave, rule = args.regions.parts, args.memory, args.leave, args.rule
    table, caps, recent, q_pos = _flat(table), _flat(args.caps), _flat(args.recent), _flat(args.q_pos)
    if lens.dtype is not INT32 or not lens.is_contiguous():
        raise OptionError("lens is written in place: it must be a contiguous int32 tensor")
    if memory.dtype is not torch.float64 or not memory.is_contiguous():
        raise OptionError("memory is written in place: it must be a contiguous float64 tensor")
    local = args.local if args.local is None else _rows(args.local.float())
    n_seq = q_pos.shape[0]
    failed = entry_point("mp_merge_slots")(
        MERGE(
            pages.bases.data_ptr(),
            pages.bases.shape[1],
            *pool_numbers(pages),
            table.data_ptr(),
            table.stride(0),
            lens.data_ptr(),
            caps.data_ptr(),
            recent.data_ptr(),
            q_pos.data_ptr(),
            memory.data_ptr(),
            0 if local is None else local.data_ptr(),
            0 if local is None else local.stride(0),
            n_seq,
            lens.shape[0] // n_seq if n_seq else 0,
            leave.evict,
            leave.sinks,
            leave.seed & 0xFFFFFFFF,
            rule.weigh,
            rule.closed,
            rule.targets,
            rule.over,
            rule.average,
            rule.draw,
            rule.bias,
            rule.masses and pages.masses,
            thread_count(),
            rule.threshold,
            rule.rate,
            rule.cover,
            rule.most,
        )
    )
    if failed:
        raise MemoryError("no memory for the work space of the merging kernel")


def _flags(chosen: Tensor) -> Tensor:
    return chosen.contiguous().view(torch.uint8)


def nearest(
    keys: Tensor, values: Tensor | None, sources: Tensor, targets: Tensor, floor: float
) -> tuple[Tensor, Tensor]:
    keys, sources, targets = _rows(keys), _flags(sources), _flags(targets)
    values = None if values is None else _rows(values)
    into = torch.empty(sources.shape, dtype=torch.int64)
    alike = torch.empty(sources.shape, dtype=torch.float64)
    of_values = (0, DTYPES[keys.dtype], *keys.stride()[:2], *keys.stride()[:2], 0)
    if values is not None:
        of_values = (values.data_ptr(), DTYPES[values.dtype], *keys.stride()[:2], *values.stride()[:2], values.shape[2])
    address, dtype, *strides, value_dim = of_values
    failed = entry_point("mp_nearest")(
        NEAREST(
            keys.data_ptr(),
            address,
            DTYPES[keys.dtype],
            dtype,
            *strides,
            sources.data_ptr(),
            targets.data_ptr(),
            into.data_ptr(),
            alike.data_ptr(),
            *keys.shape[:2],
            keys.shape[2],
            value_dim,
            thread_count(),
            floor,
        )
    )
    if failed:
        raise MemoryError("no memory for the work space of the likeness kernel")
    return into, alike


def mean_rows(x: Tensor, weight: Tensor, own: Tensor, into: Tensor, leaves: Tensor) -> Tensor:
    x, into, leaves = _rows(x), into.contiguous(), _flags(leaves)
    weight, own = weight.double().contiguous(), own.double().contiguous()
    out = torch.empty(x.shape, dtype=torch.float32)
    failed = entry_point("mp_mean_rows")(
        MEAN(
            x.data_ptr(),
            DTYPES[x.dtype],
            *x.stride()[:2],
            weight.data_ptr(),
            own.data_ptr(),
            into.data_ptr(),
            leaves.data_ptr(),
            out.data_ptr(),
            *x.shape,
            thread_count(),
        )
    )
    if failed:
        raise MemoryError("no memory for the work space of the merging kernel")
    return out
