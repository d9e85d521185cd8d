"""Call of the native sums beside blocks, see `ops.block_sums`."""

from __future__ import annotations

from struct import Struct

from millpond.kernels.block_args import BlockSumsArgs
from millpond.kernels.eager import block_sums as eager
from millpond.kernels.native.structs import DTYPES, address_of, flat_indices, readable_rows, run
from millpond.kernels.thread_count import thread_count

#: the order of fields is that of csrc/common/args.hpp
BLOCK_SUMS = Struct("=23q3d").pack


def block_sums(args: BlockSumsArgs) -> None:
    """Run `OpSet.block_sums`."""
    if args.keys.dtype not in DTYPES:
        eager.block_sums(args)
        return
    q, table, lens, order = readable_rows(args.q), flat_indices(args.table), flat_indices(args.lens), args.order
    sinks = None if args.shape.sink_logits is None else args.shape.sink_logits.float().contiguous()
    lens = lens.contiguous()
    if not len(q):
        return
    struct = BLOCK_SUMS(
        q.data_ptr(),
        args.keys.data_ptr(),
        order.row_at.data_ptr(),
        order.column_at.data_ptr(),
        table.data_ptr(),
        lens.data_ptr(),
        address_of(sinks),
        args.sums.data_ptr(),
        DTYPES[q.dtype],
        DTYPES[args.keys.dtype],
        *q.stride()[:2],
        *args.keys.stride()[:2],
        table.stride(0),
        *q.shape[:2],
        args.keys.shape[1],
        len(order.row_at),
        q.shape[2],
        int(order.neighbours),
        int(args.reduce),
        thread_count(),
        args.shape.scale,
        args.shape.softcap,
        args.decay,
    )
    run("mp_block_sums", "the sums of attention", struct)
