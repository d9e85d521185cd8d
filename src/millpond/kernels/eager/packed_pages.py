"""Packed pages in plain torch: entries written one by one or by whole pages, and read back (`ops.write_packed`)."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from millpond.errors import OptionError
from millpond.kernels.args import EntryRows, PaddedEntries
from millpond.kernels.packed import codes
from millpond.kernels.packed.across_heads import encode_across
from millpond.kernels.packed.codes import Fixed
from millpond.kernels.packed.regions import PackedRegions

#: Pages that are encoded at a time.
TOGETHER = 256


def is_whole(regions: PackedRegions, start: Tensor, count: Tensor) -> bool:
    """Whether these runs of slots are whole pages."""
    slots = regions.pages.slots
    return not bool(((start % slots) | (count % slots)).any())


def write(regions: PackedRegions, rows: EntryRows) -> None:
    """Write whole pages as `ops.write_packed` does, if `is_whole`."""
    slots = regions.pages.slots
    n_pages = rows.count.long() // slots
    max_pages = int(n_pages.max()) if len(n_pages) else 0
    region, column = (torch.arange(max_pages, device=n_pages.device) < n_pages[:, None]).nonzero().unbind(1)
    for begin in range(0, len(region), TOGETHER):
        part = slice(begin, begin + TOGETHER)
        r, first = region[part], column[part] * slots
        source_columns = rows.index[r].long().gather(1, first[:, None] + torch.arange(slots, device=first.device))
        ids = regions.table[r, (rows.start[r].long() + first) // slots].long()
        _write(regions, ids, r, rows, source_columns)


def write_across_heads(regions: PackedRegions, rows: EntryRows) -> None:
    """Write whole pages whose ranges and outliers are those of a token over all KV heads.

    Raises:
        OptionError: the heads of a sequence take other tokens, or parts of pages.
    """
    scales = regions.key_scales
    assert scales is not None, "only calibrated formats have ranges over all heads"
    n_heads = len(scales)
    slots, heads = regions.pages.slots, torch.arange(n_heads, device=rows.start.device)
    runs = torch.stack([rows.start, rows.count], 1).view(-1, n_heads, 2)
    if bool((runs % slots).any() or (runs != runs[:, :1]).any()):
        raise OptionError("ranges over all heads are of whole pages of the same tokens in every head of a sequence")
    start, n_pages = runs[:, 0, 0].long(), runs[:, 0, 1].long() // slots
    max_pages = int(n_pages.max()) if len(n_pages) else 0
    sequence, column = (torch.arange(max_pages, device=heads.device) < n_pages[:, None]).nonzero().unbind(1)
    together = max(TOGETHER // n_heads, 1)
    for begin in range(0, len(sequence), together):
        part = slice(begin, begin + together)
        r = (sequence[part, None] * n_heads + heads).flatten()
        first = column[part].repeat_interleave(n_heads) * slots
        columns = rows.index[r].long().gather(1, first[:, None] + torch.arange(slots, device=heads.device))
        ids = regions.table[r, (start[sequence[part]].repeat_interleave(n_heads) + first) // slots].long()
        _write(regions, ids, r, rows, columns, n_heads)


def _write(
    regions: PackedRegions, ids: Tensor, r: Tensor, rows: EntryRows, source_columns: Tensor, n_heads: int = 0
) -> None:
    """Write pages `ids` (P,) of regions r (P,) from columns (P, slots) of their rows.

    n_heads: KV heads of which the pages are, one after another, for ranges over all of them.
    """
    pages, at = regions.pages, r[:, None]
    keys, values, positions = (t[at, source_columns] for t in (rows.keys, rows.values, rows.positions))
    keys, values = stored_keys(regions, r, keys, positions), stored_values(regions, r, values)
    coded = []
    for (side, _, _, is_key), x in zip(codes.sides(pages.layout), (keys, values), strict=True):
        fixed = fixed_of(regions, r) if is_key else None
        encoded = encode_across(x, side, fixed, n_heads) if side.across_heads else codes.encode(x, side, fixed)
        coded.append(codes.to_bytes(encoded, side, is_key))
    _put(pages.codes, ids, torch.cat(coded, 1))
    _put(pages.positions, ids, positions)
    zeros = torch.zeros_like(positions).float()
    _put(pages.scores, ids, zeros if rows.scores is None else rows.scores[at, source_columns].float())
    if pages.masses:
        _put(pages.log_masses, ids, zeros if rows.log_masses is None else rows.log_masses[at, source_columns].float())


def _put(arenas: list[Tensor], ids: Tensor, rows: Tensor) -> None:
    """Write whole pages of bytes or slots, rows (P, n), into a list of arenas."""
    per = arenas[0].shape[0]
    for i in sorted(set((ids // per).tolist())):
        in_arena = ids // per == i
        arenas[i][ids[in_arena] - i * per, : rows.shape[1]] = rows[in_arena]


def fixed_of(regions: PackedRegions, r: Tensor) -> Fixed | None:
    """Return calibrated scales and zeros (P, 1, key_dim) of keys of regions r (P,), if any."""
    scales, zeros = regions.key_scales, regions.key_zeros
    if scales is None or zeros is None:
        return None
    head = r % len(scales)
    return scales[head].float()[:, None], zeros[head].float()[:, None]


#: Pages that `read` decodes at a time.
READ_TOGETHER = 256


def stored_keys(regions: PackedRegions, r: Tensor, keys: Tensor, positions: Tensor) -> Tensor:
    """Return keys (P, n, head_dim) of regions r (P,) as they are stored.

    They are before RoPE, or those of the channels that are kept, balanced.
    """
    if regions.rope is not None:
        return regions.rope.turn_back(keys.float(), positions)
    if regions.channels is not None:
        keys = keys.gather(2, regions.channels[r].long()[:, None].expand(-1, keys.shape[1], -1))
    return keys.float() / regions.balance[r][:, None] if regions.balance is not None else keys


def stored_values(regions: PackedRegions, r: Tensor, values: Tensor) -> Tensor:
    """Return values (P, n, value_dim) of regions r (P,) in the channels that are kept."""
    if regions.value_channels is None:
        return values
    return values.gather(2, regions.value_channels[r].long()[:, None].expand(-1, values.shape[1], -1))


def _whole_values(regions: PackedRegions, r: Tensor, values: Tensor) -> Tensor:
    """Return the values (n, whole_value_dim) of stored ones of regions r (n,).

    Channels that were dropped are zero.
    """
    if regions.value_channels is None:
        return values
    whole = values.new_zeros(len(values), regions.whole_value_dim)
    return whole.scatter(1, regions.value_channels[r].long(), values)


def _whole_keys(regions: PackedRegions, r: Tensor, keys: Tensor, positions: Tensor, head_dim: int) -> Tensor:
    """Return the keys (n, head_dim) of stored ones of regions r (n,).

    Channels that were dropped are zero.
    """
    if regions.rope is not None:
        return regions.rope.turn(keys, positions)
    if regions.balance is not None:
        keys = keys * regions.balance[r]
    if regions.channels is None:
        return keys
    return keys.new_zeros(len(keys), head_dim).scatter(1, regions.channels[r].long(), keys)


def write_packed(regions: PackedRegions, rows: EntryRows) -> None:
    pages, start, count, positions = regions.pages, rows.start, rows.count, rows.positions
    if is_whole(regions, start, count):
        write(regions, rows)
        return
    for r in range(regions.table.shape[0]):
        n, begin = int(count[r]), int(start[r])
        if n <= 0:
            continue
        row, own_head = rows.index[r, :n].long(), torch.full((1,), r, device=start.device)
        keys = stored_keys(regions, own_head, rows.keys[r, row][None], positions[r, row][None])[0]
        pair = (keys, stored_values(regions, own_head, rows.values[r, row][None])[0])
        slots = torch.arange(begin, begin + n, device=start.device)
        for i in range(begin // pages.slots, (begin + n - 1) // pages.slots + 1):
            mine = slots // pages.slots == i
            arena, at = divmod(int(regions.table[r, i]), pages.pages_per_arena)
            first = int(slots[mine][0]) % pages.slots
            columns = slice(first, first + int(mine.sum()))
            bytes_ = pages.codes[arena][at]
            for (side, offsets, dim, is_key), x in zip(codes.sides(pages.layout), pair, strict=True):
                new = codes.encode(x[mine][None], side, fixed_of(regions, own_head) if is_key else None)
                if columns != slice(0, pages.slots):
                    old = codes.from_bytes(bytes_[None], side, offsets, pages.slots, dim, is_key)
                    new = codes.replace_slots(old, new, side, first)
                bytes_[offsets.codes : offsets.codes + offsets.size] = codes.to_bytes(new, side, is_key)[0]
            selected = row[mine]
            pages.positions[arena][at, columns] = positions[r, selected]
            pages.scores[arena][at, columns] = 0.0 if rows.scores is None else rows.scores[r, selected]
            if pages.masses:
                pages.log_masses[arena][at, columns] = 0.0 if rows.log_masses is None else rows.log_masses[r, selected]


def no_entries(regions: PackedRegions, width: int, head_dim: int) -> PaddedEntries:
    """Return what `read_packed` returns of empty regions, to be filled."""
    zeros = partial(torch.zeros, regions.table.shape[0], width, device=regions.table.device)
    values = zeros(regions.whole_value_dim or regions.pages.layout.value_dim)
    masses = zeros() if regions.pages.masses else None
    return PaddedEntries(zeros(head_dim), values, zeros(dtype=torch.int32).fill_(-1), zeros(), masses)


def read_packed(regions: PackedRegions, width: int, head_dim: int) -> PaddedEntries:
    found, pages = no_entries(regions, width, head_dim), regions.pages
    if not width or not pages.codes:
        return found
    keys, values, positions, scores, masses = found
    slots, columns = (torch.arange(n, device=regions.table.device) for n in (pages.slots, regions.table.shape[1]))
    used = columns * pages.slots < regions.lens[:, None]  # (R, n) pages
    region, column = used.nonzero().unbind(1)
    for first in range(0, len(region), READ_TOGETHER):
        part = slice(first, first + READ_TOGETHER)
        r, begin = region[part], column[part] * pages.slots
        ids = regions.table[r, column[part]].long()
        inside = begin[:, None] + slots < regions.lens[r][:, None]
        row, at = r[:, None].expand_as(inside)[inside], (begin[:, None] + slots)[inside]
        decoded = _decoded(regions, ids, r)
        positions[row, at] = _rows(pages.positions, ids)[inside]
        keys[row, at] = _whole_keys(regions, row, decoded[0][inside], positions[row, at], head_dim)
        values[row, at] = _whole_values(regions, row, decoded[1][inside])
        scores[row, at] = _rows(pages.scores, ids)[inside]
        if masses is not None:
            masses[row, at] = _rows(pages.log_masses, ids)[inside]
    return found


def _rows(arenas: list[Tensor], ids: Tensor) -> Tensor:
    """Return whole pages (n, ...) out of a list of arenas."""
    per = arenas[0].shape[0]
    out = arenas[0].new_empty(len(ids), *arenas[0].shape[1:])
    for i, arena in enumerate(arenas):
        in_arena = ids // per == i
        out[in_arena] = arena[ids[in_arena] - i * per]
    return out


def _decoded(regions: PackedRegions, ids: Tensor, r: Tensor) -> list[Tensor]:
    """Return keys as stored and values (n, slots, dim) float32 of whole pages.

    Pages are `ids` (n,) of regions `r` (n,).
    """
    pages, sides = regions.pages, []
    rows = _rows(pages.codes, ids)
    for side, offsets, dim, is_key in codes.sides(pages.layout):
        fixed = fixed_of(regions, r) if is_key else None
        parts = codes.from_bytes(rows, side, offsets, pages.slots, dim, is_key)
        sides.append(codes.decode(parts, side, fixed))
    return sides
