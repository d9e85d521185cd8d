"""Reading and writing of all entries of one sequence, with their positions and scores."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from millpond.cache.entries import quantize
from millpond.cache.entries.compaction import SlotView
from millpond.cache.entries.quantize import write_fresh_pages
from millpond.cache.pages.page_table import PageTable
from millpond.cache.pages.region_arrays import Ints
from millpond.cache.types import Entries, by_position
from millpond.kernels import ops
from millpond.kernels.args import EntryRows, PaddedEntries
from millpond.kernels.pages import Arenas
from millpond.policy.view import columns_of


def read(table: PageTable, sequence: int, n_if_complete: int | None = None) -> Entries:
    """Return all entries of a sequence, one row per KV head, padded at the end, in any order.

    Args:
        table: Table of the layer.
        sequence: Sequence in the table.
        n_if_complete: Tokens so far: plain entries that are as many in every head are `complete`. None if gaps between
            positions were closed, so that the number does not tell.
    """
    rows, lens = table.rows(sequence), table.lengths()[sequence]
    width = int(lens.max(initial=0))
    plain = Entries(*ops.read(table.regions_of(rows), width))
    if n_if_complete is not None and (lens == n_if_complete).all():
        return plain._replace(complete=True)
    return plain if table.quantized is None else quantize.before(table.quantized, sequence, plain)


def in_order(entries: Entries) -> PaddedEntries:
    """Return entries in the order of their positions, padding at the end."""
    order = by_position(entries.positions)
    return PaddedEntries(
        columns_of(entries.keys, order),
        columns_of(entries.values, order),
        columns_of(entries.positions, order),
        columns_of(entries.scores, order),
        None if entries.log_masses is None else columns_of(entries.log_masses, order),
    )


def join(past: Entries, k: Tensor, v: Tensor, q_pos: Tensor, scores: Tensor | None = None) -> Entries:
    """Return stored entries and then new ones.

    Args:
        past: Stored entries.
        k: Keys (H, Q, key_dim).
        v: Values (H, Q, value_dim).
        q_pos: Positions (Q,) of the new entries.
        scores: Scores (H, Q) float32 of the new entries; None for zero.
    """
    n_new = k.shape[1]
    positions = q_pos.expand(k.shape[0], -1)
    if not past.positions.shape[1]:
        scores = torch.zeros(positions.shape, device=k.device) if scores is None else scores
        return Entries(k, v, positions, scores, complete=past.complete)
    return Entries(
        torch.cat([past.keys.to(k.dtype), k], 1),
        torch.cat([past.values.to(v.dtype), v], 1),
        torch.cat([past.positions, positions], 1),
        F.pad(past.scores, (0, n_new)) if scores is None else torch.cat([past.scores, scores], 1),
        None if past.log_masses is None else F.pad(past.log_masses, (0, n_new)),
        past.n_quantized,
        past.complete,
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
    table: PageTable, sequence: int, k: Tensor, v: Tensor, q_pos: Tensor, entries: Entries, *, last: bool
) -> None:
    """Store all new entries as `append`; `entries`: stored and new ones.

    last: see `replace`.
    """
    if table.quantized is None or not (last or entries.n_quantized):
        append(table, sequence, k, v, q_pos)
    else:
        counts = table.entries()[sequence] + k.shape[1]
        quantize.replace(table, sequence, entries, None, seal=last, counts=counts)


def replace(table: PageTable, sequence: int, entries: Entries, keep: Tensor, *, last: bool = True) -> None:
    """Hold exactly the kept candidates (H, N), by position, in fresh neighbouring pages.

    If a table quantizes entries, quantized ones stay as they are, and more are quantized unless a plan is still to come
    (`last` is False).
    """
    if table.quantized is not None:
        quantize.replace(table, sequence, entries, keep, seal=last)
        return
    order = by_position(torch.where(keep, entries.positions, -1))
    counts = keep.sum(1).cpu().numpy()
    write_fresh_pages(table, sequence, entries, order[:, : int(counts.max())], counts)


def keep_columns(
    table: PageTable, sequence: int, entries: Entries, columns: Tensor, counts: Ints, *, last: bool = True
) -> None:
    """Hold exactly the first counts (H,) of columns (H, n) of `complete` candidates.

    The columns ascend. See `replace`.
    """
    if table.quantized is None:
        write_fresh_pages(table, sequence, entries, columns, counts)
    else:
        quantize.hold_columns(table, sequence, entries, columns, counts, seal=last)


def drop(table: PageTable, sequence: int, entries: Entries, gone: Tensor, *, last: bool = True) -> None:
    """Hold all candidates but those `gone` (H, N), whatever a plan would move to a lower tier.

    last: see `replace`.
    """
    if table.quantized is not None and table.quantized.codec.tiered:
        quantize.drop(table, sequence, entries, gone)
    else:
        replace(table, sequence, entries, (entries.positions >= 0) & ~gone, last=last)


def set_scores(table: PageTable, before: Tensor, values: Tensor, factors: Tensor | None = None) -> None:
    """Give stored tokens of every sequence new scores, the same in all KV heads.

    Args:
        table: Table of the layer.
        before: Position (S,) of the first of these tokens.
        values: Scores (S, n) float32 of the tokens at positions before, before + 1, ...; tokens that are not stored are
            skipped.
        factors: Factors (S,) of the scores of all earlier tokens; None to keep these.
    """
    table.copy_on_write(whole=True)
    slots, n = SlotView.of(table, np.arange(table.n_regions)), values.shape[1]
    if not slots.positions.numel():
        return
    place = slots.positions - before.repeat_interleave(table.n_kv_heads)[:, None]
    told = slots.valid & (place >= 0) & (place < n)
    scores = values.repeat_interleave(table.n_kv_heads, 0).gather(1, place.clamp(0, n - 1).long())
    if factors is not None:
        aged = slots.scores * factors.repeat_interleave(table.n_kv_heads)[:, None]
        scores, told = torch.where(told, scores, aged), told | (slots.valid & (place < 0))
    slots.rescore(scores, told)


def gather(arrays: Arenas, pages: Tensor, numbers: list[Tensor]) -> Tensor:
    """Return `numbers`, positions or scores by arena, of pages (H, n), (H, n * slots)."""
    pages = pages.long()
    arena, row = pages // arrays.pages_per_arena, pages % arrays.pages_per_arena
    gathered = torch.empty(*pages.shape, arrays.slots, dtype=numbers[0].dtype, device=pages.device)
    for number, memory in enumerate(numbers):
        chosen = arena == number
        gathered[chosen] = memory[row[chosen]]
    return gathered.flatten(1)
