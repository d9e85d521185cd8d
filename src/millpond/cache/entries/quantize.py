"""Quantization of entries: what stays of a sequence, as codes or as numbers, and how codes age into lower tiers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from millpond.cache.entries.oldest import counts_of, n_codes, newest, oldest, split, split_columns
from millpond.cache.pages.aged_store import QuantizedPart
from millpond.cache.pages.page_table import PageTable
from millpond.cache.pages.quantized_regions import Ints
from millpond.cache.pages.quantized_store import NewCodes, QuantizedStore
from millpond.cache.pages.ref_counted_pool import PageIds
from millpond.cache.types import Entries, by_position
from millpond.kernels import ops
from millpond.kernels.args import EntryRows, PaddedEntries, joined
from millpond.kernels.transfers import on_device

#: Beyond all positions: what lies in the next tier already goes before what comes from above.
FAR = 2**30


def due(table: PageTable, upper: QuantizedStore, lower: QuantizedStore, more: Ints | int = 0) -> Ints:
    """Return how many entries of `upper` belong in the next tier, (n_seq, n_kv_heads).

    Args:
        table: Table of the layer.
        upper: Tier that holds them.
        lower: Tier after it.
        more: Entries that may be added to `upper` before.
    """
    held, parts = table.entries(), table.packed_parts
    below = sum((part.live for part in parts[parts.index(lower) :]), np.zeros_like(held))
    n_due: Ints = np.minimum(held - newest(lower.codec, held) - below, upper.live + more)
    return n_due


def pass_down(table: PageTable, active: np.ndarray) -> None:
    """Move entries of the sequences that are `active` (S,) bool to the tiers for their age.

    Raises:
        PoolFullError: the pool is full; other entries stay in their tiers.
    """
    for upper, lower in pairwise(table.packed_parts):
        over = due(table, upper, lower)
        for sequence in np.flatnonzero(active & (over >= lower.slots).any(1)).tolist():
            _pass(upper, lower, sequence, over[sequence].clip(min=0))


def _pass(upper: QuantizedStore, lower: QuantizedStore, sequence: int, over: Ints) -> None:
    """Encode as many of the oldest `over` (H,) entries of one tier as fill pages of the next.

    Entries of pages of the next tier that are at least half dead are encoded again with them, if both fill pages.
    """
    rows, slots = upper.rows(sequence), lower.slots
    sparse = lower.sparse(rows)
    again = lower.pages_of(rows, sparse)
    stays = (again.positions >= 0).sum(1).cpu().numpy()
    cut = (over + stays) // slots * slots < stays  # what survives there would not all find a place
    if cut.any():
        sparse[cut] = False
        again = lower.pages_of(rows, sparse)
        stays = (again.positions >= 0).sum(1).cpu().numpy()
    count = (over + stays) // slots * slots
    entries = joined([again, upper.read(sequence)])
    n_again = again.positions.shape[1]
    age = entries.positions.clone()
    age[:, n_again:] += torch.where(age[:, n_again:] >= 0, FAR, 0)
    order = by_position(age)
    lower.absorb(sequence, NewCodes(count, order[:, : int(count.max())], entries), emptied=sparse)
    chosen = torch.arange(order.shape[1], device=order.device) < on_device(count, order.device)[:, None]
    moved = torch.zeros_like(chosen).scatter_(1, order, chosen)[:, n_again:]
    upper.absorb(sequence, kept=~moved, emptied=upper.sparse(rows, moved, whole=True))


def write_fresh_pages(table: PageTable, sequence: int, entries: Entries, index: Tensor, counts: Ints) -> None:
    """Hold the first counts (H,) candidates of index (H, n), and nothing else, in fresh pages.

    Raises:
        PoolFullError: the pool is full; nothing was changed.
    """
    lens = counts.astype(np.int32)
    rows = table.rows(sequence)
    table.renew(sequence, lens)
    start, count = on_device(np.stack([np.zeros_like(lens), lens]), index.device)
    ops.write(table.regions_of(rows), EntryRows(start, count, index.int().contiguous(), *entries[:5]))
    table.set_lengths(sequence, lens)


def before(quantized: QuantizedPart, sequence: int, plain: Entries) -> Entries:
    """Return all entries of a sequence: dequantized ones, slot by slot, then the plain ones."""
    if not quantized.width(sequence):
        return plain
    return behind(quantized.read(sequence), plain)._replace(n_quantized=quantized.width(sequence))


def replace(
    table: PageTable, sequence: int, entries: Entries, keep: Tensor | None, *, seal: bool, counts: Ints | None = None
) -> None:
    """Hold exactly the kept candidates, and quantize as many as the format wants, if `seal`.

    Quantized entries that stay keep their codes, evicted ones become tombstones; only survivors in a page that is at
    least half dead are encoded again. Candidates of which none was quantized (a merge made them) replace everything. In
    a format with tiers nothing leaves: what is not kept is quantized.

    Args:
        table: Table of the layer.
        sequence: Sequence in the table.
        entries: Candidates.
        keep: Candidates that are kept, (H, N) bool; None for all.
        seal: Whether to quantize entries.
        counts: Kept candidates of each head, (H,), if the host knows them; they are read from the device otherwise.
    """
    quantized = table.quantized
    assert quantized is not None
    n, rows = entries.n_quantized, table.rows(sequence)
    none_leaves = not n or (keep is None and not any(part.n_evicted[rows].any() for part in quantized.parts))
    if not quantized.codec.tiered and none_leaves:
        _replace_plain(table, quantized, sequence, entries, keep, counts, seal=seal)
    else:
        here = entries.positions >= 0
        _replace_some(table, quantized, sequence, entries, here, here if keep is None else keep, seal=seal)
    if seal and not quantized.codec.tiered:
        pass_down(table, np.arange(table.n_seq) == sequence)


def _replace_plain(
    table: PageTable,
    quantized: QuantizedPart,
    sequence: int,
    entries: Entries,
    keep: Tensor | None,
    counts: Ints | None,
    *,
    seal: bool,
) -> None:
    """Do what `replace` does where no quantized entry leaves.

    Of the others the oldest ones are quantized. The host knows how many these are, so nothing is read from the device.
    """
    n = entries.n_quantized
    if not n:
        quantized.forget(sequence)
    first, held = quantized.parts[0], quantized.live[sequence]
    positions = entries.positions[:, n:]
    if keep is not None:
        positions = torch.where(keep[:, n:], positions, -1)
    if counts is None:
        counts = (positions >= 0).sum(1).cpu().numpy() + held
    n_plain = counts - held
    more = n_codes(first, n_plain, counts) if seal else np.zeros_like(n_plain)
    codes, plain = split(by_position(positions), positions, n_plain, more, first.codec.sinks)
    if n:
        codes, plain = codes + n, plain + n
    scores = entries.scores[:, :n] if n else None
    _write_both(table, quantized, sequence, entries, (codes, plain), (more, n_plain - more), scores=scores)


def hold_columns(
    table: PageTable, sequence: int, entries: Entries, columns: Tensor, counts: Ints, *, seal: bool
) -> None:
    """Do what `replace` does of `complete` candidates.

    Kept are the first counts (H,) of columns (H, n), which ascend.
    """
    quantized = table.quantized
    assert quantized is not None
    quantized.forget(sequence)
    both, numbers = split_columns(quantized.parts[0], columns, counts, seal=seal)
    _write_both(table, quantized, sequence, entries, both, numbers)
    if seal:
        pass_down(table, np.arange(table.n_seq) == sequence)


def _replace_some(
    table: PageTable,
    quantized: QuantizedPart,
    sequence: int,
    entries: Entries,
    here: Tensor,
    keep: Tensor,
    *,
    seal: bool,
) -> None:
    """Do what `replace` does where quantized entries may leave, `here` and `keep` (H, N) bool."""
    if quantized.codec.tiered and len(quantized.parts) > 1:
        hold_tiers(table, sequence, entries, keep, seal=seal)
        return
    n, codes, plain = entries.n_quantized, here & ~keep, here & keep
    kept, scores, emptied = None, None, None
    if quantized.codec.tiered:
        codes[:, :n], plain[:, :n] = False, False
    else:
        first, n_kept = quantized.parts[0], plain.sum(1).cpu().numpy()
        kept, scores, width = keep[:, :n], entries.scores[:, :n], first.width(sequence)
        emptied = first.sparse(first.rows(sequence), codes[:, :width])
        column = torch.arange(width, device=plain.device)
        plain[:, :width] &= torch.from_numpy(emptied).to(plain.device)[:, column // first.slots]
        plain[:, width:n] = False  # what passed into a later tier stays there
        codes = oldest(first, entries.positions, plain, n_kept) if seal else torch.zeros_like(plain)
        plain &= ~codes
    absorb(table, quantized, sequence, entries, codes, plain, kept, scores, emptied)


def hold_tiers(table: PageTable, sequence: int, entries: Entries, keep: Tensor, *, seal: bool) -> None:
    """Hold kept candidates (H, N) in the upper of two tiers of codes, others in the lower.

    Without `seal`, kept ones that are plain stay so. Entries of the lower tier stay there. Those of the upper one are
    encoded again with the plain ones that join them, from the numbers that their codes stand for, whose range is that
    of the codes: they lose nothing.

    Raises:
        PoolFullError: a pool is full; entries stay in their tiers.
    """
    upper, lower = table.packed_parts
    n, dtype = entries.n_quantized, table.pool.arrays.dtype
    keys, values = (
        torch.cat([part[:, :n].float(), part[:, n:].to(dtype).float()], 1) for part in (entries.keys, entries.values)
    )
    entries = entries._replace(keys=keys, values=values)
    rows, here = table.rows(sequence), entries.positions >= 0
    above = upper.width(sequence) if n else 0
    movable = here.clone()
    movable[:, above:n] = False
    plain = movable & keep
    stays = plain[:, :above].clone()
    if not seal:
        plain[:, :above] = False
    chosen = [movable & ~keep, plain]
    orders = [by_position(torch.where(one, entries.positions, -1)) for one in chosen]
    counts = counts_of(chosen)
    orders = [order[:, : int(count.max())] for order, count in zip(orders, counts, strict=True)]
    below, new = (
        NewCodes(count, order, PaddedEntries(*entries[:5])) for order, count in zip(orders, counts, strict=True)
    )

    def write_rest() -> None:
        if not above:
            upper.absorb(sequence, new if seal else None)
        elif seal:
            emptied = upper.sparse(rows, here[:, :above], whole=True)
            upper.absorb(sequence, new, kept=torch.zeros_like(here[:, :above]), emptied=emptied)
        else:
            upper.absorb(sequence, kept=stays, scores=entries.scores[:, :above])
        count = np.zeros_like(counts[1]) if seal else counts[1]
        write_fresh_pages(table, sequence, entries, orders[1], count)

    lower.absorb(sequence, below, write_rest=write_rest)


def drop(table: PageTable, sequence: int, entries: Entries, gone: Tensor) -> None:
    """Evict entries of both tiers, `gone` (H, N) bool; none of the others moves."""
    (quantized,) = table.packed_parts
    n, here = entries.n_quantized, entries.positions >= 0
    plain = here & ~gone
    plain[:, :n] = False
    leaving = (here & gone)[:, :n]
    emptied = quantized.sparse(table.rows(sequence), leaving, whole=True)
    absorb(table, quantized, sequence, entries, torch.zeros_like(plain), plain, ~leaving, emptied=emptied)


def plain_entries(table: PageTable, sequence: int) -> Entries:
    rows, width = table.rows(sequence), int(table.lengths()[sequence].max())
    return Entries(*ops.read(table.regions_of(rows), width))


def begin_with_codes(table: PageTable, pages: PageIds) -> None:
    """Let the only sequence hold its first codes in pages (Hkv, n) of others.

    Nothing of it is quantized yet. The pages are full, and hold what would be quantized of it: its first entries after
    the sinks. These leave the plain pages.

    Raises:
        PoolFullError: no room for the plain entries that stay; nothing was changed.
    """
    (quantized,) = table.packed_parts
    n_codes, sinks, slots = pages.shape[1] * quantized.slots, quantized.codec.sinks, table.pool.slots
    if sinks or n_codes % slots:
        entries = plain_entries(table, 0)
        here = entries.positions >= 0
        stay = here & ((entries.positions < sinks) | (entries.positions >= sinks + n_codes))
        order, (counts,) = by_position(torch.where(stay, entries.positions, -1)), counts_of([stay])
        write_fresh_pages(table, 0, entries, order[:, : int(counts.max())], counts)
    else:
        table.drop_first(np.arange(table.n_regions), np.full(table.n_regions, n_codes // slots))
    quantized.begin_with(pages)


def n_first_codes(quantized: QuantizedStore, held: int) -> int:
    """Return how many pages of codes a prompt of `held` entries per head has when it was read."""
    stay = quantized.codec.sinks + quantized.codec.newest(held)
    return max(held - stay, 0) // quantized.slots


def truncate(quantized: QuantizedPart, sequence: int, seen: int) -> np.ndarray:
    """Release quantized entries from position `seen` on; return the number of each head, (H,)."""
    rows = quantized.rows(sequence)
    gone = quantized.positions(rows) >= seen
    quantized.absorb(sequence, kept=~gone)
    return gone.sum(1).cpu().numpy().astype(np.int32)


def behind(first: PaddedEntries, then: Entries) -> Entries:
    """Return two runs of entries as one, in float32: 16 bits would round codes of eight."""
    if not first.positions.shape[1]:
        return then
    masses = None
    if then.log_masses is not None and first.log_masses is not None:
        masses = torch.cat([first.log_masses, then.log_masses], 1)
    return Entries(
        torch.cat([first.keys, then.keys.float()], 1),
        torch.cat([first.values, then.values.float()], 1),
        torch.cat([first.positions, then.positions], 1),
        torch.cat([first.scores, then.scores], 1),
        masses,
    )


def absorb(
    table: PageTable,
    quantized: QuantizedPart,
    sequence: int,
    entries: Entries,
    codes: Tensor,
    plain: Tensor,
    kept: Tensor | None = None,
    scores: Tensor | None = None,
    emptied: np.ndarray | None = None,
) -> None:
    """Quantize the candidates `codes`, and write the `plain` ones to plain pages, (H, N) bool.

    Codes are made of numbers as plain pages hold them, whether an entry was ever stored in one or not.

    Args:
        table: Table of the layer.
        quantized: Quantized part that takes the codes.
        sequence: Sequence in the table.
        entries: Candidates.
        codes: Candidates that are quantized.
        plain: Candidates that plain pages hold; these drop all others.
        kept: See `QuantizedStore.absorb`.
        scores: See there.
        emptied: See there.

    Raises:
        PoolFullError: the pool is full; nothing was changed.
    """
    orders = [by_position(torch.where(chosen, entries.positions, -1)) for chosen in (codes, plain)]
    counts = counts_of([codes, plain])
    new, rest = (order[:, : int(count.max())] for order, count in zip(orders, counts, strict=True))
    _write_both(table, quantized, sequence, entries, (new, rest), counts, kept, scores, emptied)


def _write_both(
    table: PageTable,
    quantized: QuantizedPart,
    sequence: int,
    entries: Entries,
    columns: tuple[Tensor, Tensor],
    counts: Sequence[Ints],
    kept: Tensor | None = None,
    scores: Tensor | None = None,
    emptied: np.ndarray | None = None,
) -> None:
    """Quantize candidates, and write others to plain pages.

    Both are columns (H, n) of `entries`, of which a head has its count (H,). See `absorb`.
    """
    dtype = table.pool.arrays.dtype
    entries = entries._replace(keys=entries.keys.to(dtype), values=entries.values.to(dtype))

    def write_plain() -> None:
        write_fresh_pages(table, sequence, entries, columns[1], counts[1])

    new = NewCodes(counts[0], columns[0], PaddedEntries(*entries[:5]))
    quantized.absorb(sequence, new, kept=kept, scores=scores, emptied=emptied, write_rest=write_plain)
