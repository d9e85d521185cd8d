"""Reading and writing of all entries of one sequence, with the positions and scores stored beside them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from millpond.cache.entries import quantize
from millpond.cache.entries.compaction import SlotView
from millpond.cache.entries.quantize import write_fresh_pages
from millpond.cache.pages.page_table import PageTable
from millpond.cache.types import Entries, by_position
from millpond.kernels import ops
from millpond.kernels.args import EntryRows, PaddedEntries
from millpond.kernels.pages import Arenas
from millpond.policy.view import columns_of


def read(table: PageTable, sequence: int) -> Entries:
    """All entries that a sequence holds, one row per KV head, padded at the end, in any order."""
    rows = table.rows(sequence)
    width = int(table.lengths()[sequence].max(initial=0))
    plain = Entries(*ops.read(table.regions_of(rows), width))
    return plain if table.quantized is None else quantize.before(table.quantized, sequence, plain)


def in_order(found: Entries) -> PaddedEntries:
    """Entries in the order of their positions, padding at the end."""
    order = by_position(found.positions)
    return PaddedEntries(
        columns_of(found.keys, order),
        columns_of(found.values, order),
        columns_of(found.positions, order),
        columns_of(found.scores, order),
        None if found.log_masses is None else columns_of(found.log_masses, order),
    )


def join(past: Entries, k: Tensor, v: Tensor, q_pos: Tensor, scores: Tensor | None = None) -> Entries:
    """Stored entries and new ones, k (H, Q, key_dim) and v (H, Q, value_dim) at positions q_pos (Q,), after them.

    scores: (H, Q) float32 of the new ones; None: zero.
    """
    n_new = k.shape[1]
    positions = q_pos.expand(k.shape[0], -1)
    if not past.positions.shape[1]:
        return Entries(k, v, positions, torch.zeros(positions.shape, device=k.device) if scores is None else scores)
    return Entries(
        torch.cat([past.keys.to(k.dtype), k], 1),
        torch.cat([past.values.to(v.dtype), v], 1),
        torch.cat([past.positions, positions], 1),
        F.pad(past.scores, (0, n_new)) if scores is None else torch.cat([past.scores, scores], 1),
        None if past.log_masses is None else F.pad(past.log_masses, (0, n_new)),
        past.n_quantized,
    )


def append(table: PageTable, sequence: int, k: Tensor, v: Tensor, q_pos: Tensor, scores: Tensor | None = None) -> None:
    """Store all new entries after the stored ones; scores: (H, Q) float32, None: zero."""
    rows = table.rows(sequence)
    n_heads, n_new = k.shape[:2]
    table.copy_on_write(whole=False)
    start = table.lens[rows].clone()
    after = table.lengths()[sequence] + n_new
    table.reserve(sequence, after)
    index = torch.arange(n_new, dtype=torch.int32, device=k.device).expand(n_heads, -1).contiguous()
    count = torch.full((n_heads,), n_new, dtype=torch.int32, device=k.device)
    ops.write(table.regions_of(rows), EntryRows(start, count, index, k, v, q_pos.expand(n_heads, -1), scores))
    table.set_lengths(sequence, after)


def keep_all(
    table: PageTable, sequence: int, k: Tensor, v: Tensor, q_pos: Tensor, found: Entries, *, last: bool
) -> None:
    """Store all new entries, as `append`; `found`: the stored entries and the new ones. `last`: see `rewrite`."""
    if table.quantized is None or not (last or found.n_quantized):
        append(table, sequence, k, v, q_pos)
    else:
        replace(table, sequence, found, found.positions >= 0, last=last)


def replace(table: PageTable, sequence: int, found: Entries, keep: Tensor, *, last: bool = True) -> None:
    """Hold exactly the kept candidates (H, N), in the order of their positions, in fresh neighbouring pages.

    Where a table quantizes entries, quantized ones stay as they are, and more are quantized unless a plan is still to
    come (`last` is False).
    """
    if table.quantized is not None:
        quantize.replace(table, sequence, found, keep, seal=last)
        return
    order = by_position(torch.where(keep, found.positions, -1))
    counts = keep.sum(1)
    write_fresh_pages(table, sequence, found, order[:, : int(counts.max())], counts)


def drop(table: PageTable, sequence: int, found: Entries, gone: Tensor, *, last: bool = True) -> None:
    """Hold all candidates but those that are `gone` (H, N), whatever else a plan would move to a lower tier.

    last: see `replace`.
    """
    if table.quantized is not None and table.quantized.codec.tiered:
        quantize.drop(table, sequence, found, gone)
    else:
        replace(table, sequence, found, (found.positions >= 0) & ~gone, last=last)


def set_scores(table: PageTable, before: Tensor, values: Tensor, factors: Tensor | None = None) -> None:
    """Give stored tokens of every sequence new scores, the same in all KV heads.

    Args:
        before: (S,) position of the first of these tokens. values: (S, n) float32, the scores of the tokens at
            positions before, before + 1, ...; tokens that are not stored are passed over.
        factors: (S,) on the scores of all earlier tokens; None: these stay as they are.
    """
    table.copy_on_write(whole=True)
    slots, n = SlotView.of(table, np.arange(table.n_regions)), values.shape[1]
    if not slots.positions.numel():
        return
    place = slots.positions - before.repeat_interleave(table.n_kv_heads)[:, None]
    told = slots.valid & (place >= 0) & (place < n)
    found = values.repeat_interleave(table.n_kv_heads, 0).gather(1, place.clamp(0, n - 1).long())
    if factors is not None:
        aged = slots.scores * factors.repeat_interleave(table.n_kv_heads)[:, None]
        found, told = torch.where(told, found, aged), told | (slots.valid & (place < 0))
    slots.rescore(found, told)


def gather(arrays: Arenas, pages: Tensor, numbers: list[Tensor]) -> Tensor:
    """(H, n * slots): `numbers`, positions or scores by arena, of pages (H, n), which exist."""
    pages = pages.long()
    arena, row = pages // arrays.pages_per_arena, pages % arrays.pages_per_arena
    found = torch.empty(*pages.shape, arrays.slots, dtype=numbers[0].dtype, device=pages.device)
    for number, memory in enumerate(numbers):
        chosen = arena == number
        found[chosen] = memory[row[chosen]]
    return found.flatten(1)
