"""Selection of the best entries of each head in plain torch, ties to the newest, and their move to other pages."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from millpond.kernels.args import EntryRows, PaddedEntries, PageRegions
from millpond.kernels.eager.pages import read, write
from millpond.kernels.selection_args import Best, BestArgs, MoveArgs, ShareArgs

#: `OpSet.read` and `OpSet.write`.
Read = Callable[[PageRegions, int], PaddedEntries]
Write = Callable[[PageRegions, EntryRows], None]

#: Bits of a priority below its value: which entry it is.
_ENTRY_BITS = 31
#: Bytes of keys and values that `move_entries` copies at a time.
MOVED_TOGETHER = 1 << 23


def priority(value: Tensor, valid: Tensor | None, pinned: Tensor) -> Tensor:
    """Return (..., H, N) int64 priorities, no two of a layer alike, higher is kept longer.

    Pinned entries come first, then order is by value, the newest, the first head. Invalid ones come last. Values are
    compared as float32.

    Args:
        value: (..., H, N), higher is kept.
        valid: (..., H, N) bool, False in columns without an entry; None: all have one. Columns ascend in position.
        pinned: (..., H, N) bool, entries that are kept first.
    """
    bits = (value.float() + 0.0).view(torch.int32)  # + 0.0 makes one zero of the two
    ascending = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()  # integers in the order of the floats
    ascending = ascending.masked_fill(pinned, 1 << 31)
    if valid is not None:
        ascending = ascending.masked_fill(~valid, -(1 << 31) - 1)
    n_heads, n = value.shape[-2:]
    entry = torch.arange(n_heads * n, device=value.device).view(n_heads, n).flip(0)
    return (ascending << _ENTRY_BITS) + entry


def _in_spans(spans: Tensor, n: int) -> Tensor:
    """Return which of `n` columns lie in one of the spans (R, m, 2) of a row, (R, n) bool."""
    column = torch.arange(n, dtype=torch.int32, device=spans.device)
    begin, end = spans[..., 0, None], spans[..., 1, None]
    return ((column >= begin) & (column < end)).any(1)


def best_columns(args: BestArgs) -> Best:
    value, counts, width = args.value, args.counts, args.width
    is_nan = value.isnan().any(1)
    if not width:
        return Best(counts.new_zeros(len(value), 0), is_nan)
    if width == value.shape[1] and bool((counts == width).all()):
        column = torch.arange(width, dtype=torch.int32, device=value.device)
        return Best(column.expand(len(value), -1), is_nan)
    key = priority(value, None, _in_spans(args.pinned, value.shape[1]))
    lowest = key.topk(width, dim=1).values.gather(1, (counts[:, None].long() - 1).clamp(min=0))
    keep = (key >= lowest) & (counts[:, None] > 0)
    place = keep.cumsum(1) - 1
    columns = counts.new_zeros(len(value), width + 1)  # the last one takes what leaves
    column = torch.arange(value.shape[1], dtype=torch.int32, device=value.device).expand_as(place)
    return Best(columns.scatter_(1, torch.where(keep, place, width), column)[:, :width].contiguous(), is_nan)


def shared_counts(args: ShareArgs) -> Tensor:
    value, least, total = args.value, args.least, args.total
    n_layers, n_heads, n = value.shape
    pinned = _in_spans(args.pinned, n).view(value.shape)
    by_value = priority(value, None, torch.zeros_like(pinned)).flatten(1)
    first = priority(value, None, pinned).argsort(dim=2, descending=True)
    counts = []
    for layer in range(n_layers):
        floor = int(least[layer])
        secured = torch.zeros_like(pinned[layer]).scatter_(1, first[layer, :, :floor], True)
        left = int(total[layer]) - n_heads * floor
        if left > 0:
            others = by_value[layer].masked_fill(secured.flatten(), torch.iinfo(torch.int64).min)
            secured = secured.flatten().index_fill_(0, others.topk(left).indices, True).view_as(secured)
        counts.append(secured.sum(1))
    return torch.stack(counts).int()


def move_entries(args: MoveArgs) -> None:
    move_by(args, read, write)


def move_by(args: MoveArgs, read: Read, write: Write) -> None:
    """Move entries by reading all of some regions, and writing those that stay."""
    source, target, columns, counts = args.source, args.target, args.columns, args.counts
    width = int(source.lens.max()) if len(source.lens) else 0
    pages = source.pages
    row_bytes = width * (pages.key_dim + pages.value_dim) * pages.dtype.itemsize
    together = max(MOVED_TOGETHER // max(row_bytes, 1), 1)
    for begin in range(0, len(counts), together):
        rows = slice(begin, begin + together)
        entries = read(PageRegions(pages, source.table[rows], source.lens[rows]), width)
        if args.scores is not None:
            entries = entries._replace(scores=args.scores[rows])
        start = torch.zeros_like(counts[rows])
        write(
            PageRegions(target.pages, target.table[rows], target.lens[rows]),
            EntryRows(start, counts[rows], columns[rows], *entries),
        )
