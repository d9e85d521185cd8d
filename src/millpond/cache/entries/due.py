"""Quantization while decoding: whether a page of entries is due, which entries become codes then, and their pages."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from millpond.cache.entries.oldest import newest, oldest
from millpond.cache.entries.quantize import absorb, behind, due, hold_tiers, pass_down, plain_entries
from millpond.cache.pages.aged_store import QuantizedPart
from millpond.cache.pages.page_table import PageTable
from millpond.cache.pages.quantized_regions import Ints
from millpond.cache.pages.quantized_store import QuantizedStore
from millpond.cache.pages.ref_counted_pool import Pool
from millpond.cache.state.span_marks import KeptSpans
from millpond.cache.types import by_position
from millpond.kernels import ops
from millpond.kernels.args import EntryRows, PaddedEntries
from millpond.kernels.decode_rules import DecodeRule, eviction_value


def quantize_due(table: PageTable, active: np.ndarray) -> None:
    """Quantize what has gathered in plain pages, before a step of `active` (S,) sequences."""
    quantized = table.quantized
    if quantized is None or quantized.codec.tiered or _nothing_due(table, quantized):
        return
    first, lens = quantized.parts[0], table.lengths()
    if quantized.codec.ages:  # how many stay depends on how many there are
        full = lens >= max_unquantized(first, table.entries())
    else:
        most = _same_for_all(first)
        quantized.steps_until_check = most - int(lens.max(initial=0))
        full = lens >= most
    ready = np.flatnonzero(active & full.any(1))
    if len(ready) and not _quantize_run(table, first, ready):
        _quantize_oldest(table, first, ready)
    pass_down(table, active)


def _same_for_all(first: QuantizedStore) -> int:
    """Return `max_unquantized` where it does not depend on what a region holds."""
    return first.codec.sinks + first.codec.residual + first.slots


def _nothing_due(table: PageTable, quantized: QuantizedPart) -> bool:
    """Return whether no page is due to be quantized in the next step.

    False where only the device knows, for which nothing waits, and of several tiers, of which one may always be due.
    """
    if quantized.codec.tiered or quantized.codec.ages:
        return False
    if quantized.steps_until_check <= 0:
        most = _same_for_all(quantized.parts[0])
        quantized.steps_until_check = most - int(table.most_entries().max(initial=0))
    return quantized.steps_until_check > 0


def _quantize_oldest(table: PageTable, quantized: QuantizedStore, sequences: np.ndarray) -> None:
    """Quantize due entries of some sequences (n,).

    Survivors of pages that are at least half dead are encoded again with them.
    """
    for sequence in sequences.tolist():
        rows, entries = table.rows(sequence), plain_entries(table, sequence)
        sparse = quantized.sparse(rows)
        if sparse.any():
            entries = behind(quantized.pages_of(rows, sparse), entries)
        here = entries.positions >= 0
        codes = oldest(quantized, entries.positions, here, table.entries()[sequence])
        absorb(table, quantized, sequence, entries, codes, here & ~codes, emptied=sparse)


def _quantize_run(table: PageTable, quantized: QuantizedStore, sequences: np.ndarray) -> bool:
    """Quantize due entries of sequences (n,) together, if they are a run.

    In plain pages of their own they follow each other then, as they do if nothing left since entries were last
    quantized. No entry is sorted, and of a format without plain first entries none is moved.

    Returns:
        False if it is not so of all of them; then nothing was done.
    """
    codec = quantized.codec
    rows = (sequences[:, None] * table.n_kv_heads + np.arange(table.n_kv_heads)).ravel()
    stays_in_place = not codec.sinks and not quantized.slots % table.pool.slots
    if quantized.n_evicted[rows].any() or not (stays_in_place or table.owns(rows)):
        return False
    lens = table.lengths().ravel()[rows]
    loose = lens - codec.sinks - newest(codec, table.entries().ravel()[rows])
    more = np.maximum(loose, 0) // quantized.slots * quantized.slots
    chosen, width = torch.from_numpy(rows).to(table.lens.device), int(lens.max())
    entries = ops.read(table.regions_of(chosen), width)
    positions, column = entries.positions.cpu().numpy(), np.arange(width)
    there = column < lens[:, None]
    if not ((positions[:, 1:] > positions[:, :-1]) | ~there[:, 1:]).all():
        return False
    first = (there & (positions < codec.sinks)).sum(1)[:, None]
    index = torch.from_numpy((first + np.arange(int(more.max()))).astype(np.int32)).to(chosen.device)
    quantized.write_all(sequences, more, index, entries)
    if stays_in_place:
        table.drop_first(rows, more // table.pool.slots)
    else:
        _write_rest(table, sequences, chosen, entries, first, more)
    return True


def _write_rest(
    table: PageTable, sequences: np.ndarray, regions: Tensor, entries: PaddedEntries, first: Ints, more: Ints
) -> None:
    """Close the gap of `more` (n,) entries behind the `first` (n, 1) ones of regions (n,)."""
    lens = table.lengths()[sequences] - more.reshape(len(sequences), -1)
    column = np.arange(int(lens.max()))
    index = (column + np.where(column < first, 0, more[:, None])).astype(np.int32)
    count = np.where(more > 0, lens.ravel(), 0).astype(np.int32)  # the others stay where they are
    start, taken, rows = (torch.from_numpy(t).to(regions.device) for t in (np.zeros_like(count), count, index))
    ops.write(table.regions_of(regions), EntryRows(start, taken, rows, *entries))
    table.shrink(sequences, lens)


def demote_due(table: PageTable, rule: DecodeRule, at: np.ndarray, kept: KeptSpans) -> None:
    """After a step at positions `at` (S,), -1 for none, quantize entries beyond the budget.

    That happens when new entries fill a page, to the lowest by `rule` first. `kept` entries stay in the upper tier.
    """
    *uppers, quantized = table.packed_parts
    over = table.budgeted() - table.budgets()
    for sequence in np.flatnonzero((at >= 0) & (over >= quantized.slots).any(1)).tolist():
        entries = plain_entries(table, sequence)
        for upper in uppers:
            entries = behind(upper.read(sequence), entries)._replace(n_quantized=upper.width(sequence))
        positions = entries.positions
        query = torch.full((table.n_kv_heads, 1), int(at[sequence]), dtype=torch.int32, device=positions.device)
        value = eviction_value(rule, entries.scores, positions, query, table.n_kv_heads).double()
        pinned = (positions < rule.sinks) | (query - positions < table.recent[table.rows(sequence)][:, None])
        stays = kept.mask(sequence, positions)
        value = value.masked_fill(pinned if stays is None else pinned | stays, torch.inf)
        by_age = by_position(positions)
        lowest = by_age.gather(1, value.gather(1, by_age).argsort(dim=1, stable=True))
        places = torch.arange(lowest.shape[1], device=lowest.device).expand_as(lowest)
        place_of = torch.empty_like(lowest).scatter_(1, lowest, places)
        keep = (positions >= 0) & (place_of >= torch.from_numpy(over[sequence]).to(lowest.device)[:, None])
        if uppers:
            hold_tiers(table, sequence, entries, keep, seal=True)
        else:
            absorb(table, quantized, sequence, entries, (positions >= 0) & ~keep, keep)


def max_unquantized(quantized: QuantizedStore, held: Ints) -> Ints:
    """Return at how many plain entries a page is quantized, of regions that hold `held`."""
    n_plain: Ints = quantized.codec.sinks + quantized.slots + newest(quantized.codec, held)
    return n_plain


def pages_due(table: PageTable, whole: bool) -> dict[Pool, int]:
    """Return the most packed pages that the next decoding step may take of each pool.

    Args:
        table: Table of the layer.
        whole: Whether the step writes to all pages, see `QuantizedStore.n_copied`.
    """
    quantized = table.quantized
    if quantized is None:
        return {}
    first = quantized.parts[0]
    if _nothing_due(table, quantized):
        return {first.pool: first.n_copied(whole)}
    held, slots, lens = table.entries(), first.slots, table.lengths()
    if quantized.codec.tiered:
        over = table.budgeted() + 1 - table.budgets().astype(np.int64)
        lower = quantized.parts[-1]
        due_pages: dict[Pool, int] = {
            lower.pool: int(np.where(over >= slots, over // slots + 1, 0).sum()) + lower.n_copied(whole)
        }
        if lower is not first:  # the upper tier is written anew before its old pages go
            rewritten = np.asarray(over >= slots).any(1, keepdims=True)
            again = np.where(rewritten, table.budgeted() // slots + 2, 0)
            due_pages[first.pool] = int(again.sum()) + first.n_copied(True)
        return due_pages
    loose = lens - first.codec.sinks - newest(first.codec, held)
    need: dict[Pool, int] = {first.pool: _new_pages(first, loose) + first.n_copied(whole)}
    for upper, lower in pairwise(quantized.parts):
        need[lower.pool] = _new_pages(lower, due(table, upper, lower, np.maximum(loose, 0))) + lower.n_copied(True)
    return need


def _new_pages(part: QuantizedStore, more: Ints) -> int:
    """Return the pages that (n_seq, n_kv_heads) entries and half-dead pages' survivors fill."""
    dead = part.n_evicted.reshape(more.shape)
    return int(np.where(more >= part.slots, (more + 2 * dead) // part.slots + 1, 0).sum())
