"""Bulk writes of whole pages: many regions and pages in one pass of plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from millpond.kernels.args.entries import EntryRows
from millpond.kernels.packed import side_codec
from millpond.kernels.packed.regions import PackedRegions
from millpond.kernels.packed.side_codec import Fixed

#: Pages that are encoded at a time.
TOGETHER = 256


def is_whole(regions: PackedRegions, start: Tensor, count: Tensor) -> bool:
    """Whether these runs of slots are whole pages of keys that are stored in all channels and unbalanced."""
    slots = regions.pages.slots
    plainly = regions.channels is None and regions.balance is None
    return plainly and not bool((start % slots).any()) and not bool((count % slots).any())


def write(regions: PackedRegions, rows: EntryRows) -> None:
    """As `ops.write_packed`, for what `is_whole`."""
    slots = regions.pages.slots
    n_pages = rows.count.long() // slots
    most = int(n_pages.max()) if len(n_pages) else 0
    region, column = (torch.arange(most, device=n_pages.device) < n_pages[:, None]).nonzero().unbind(1)
    for begin in range(0, len(region), TOGETHER):
        part = slice(begin, begin + TOGETHER)
        r, first = region[part], column[part] * slots
        chosen = rows.index[r].long().gather(1, first[:, None] + torch.arange(slots, device=first.device))
        ids = regions.table[r, (rows.start[r].long() + first) // slots].long()
        _write(regions, ids, r, rows, chosen)


def _write(regions: PackedRegions, ids: Tensor, r: Tensor, rows: EntryRows, chosen: Tensor) -> None:
    """Pages `ids` (P,) of regions r (P,) from the `chosen` (P, slots) of the rows of these regions."""
    pages, at = regions.pages, r[:, None]
    keys, values, positions = (t[at, chosen] for t in (rows.keys, rows.values, rows.positions))
    if regions.rope is not None:
        keys = regions.rope.turn_back(keys.float(), positions)
    coded = []
    for (side, _, _, is_key), x in zip(side_codec.sides(pages.layout), (keys, values), strict=True):
        coded.append(
            side_codec.to_bytes(side_codec.encode(x, side, fixed_of(regions, r) if is_key else None), side, is_key)
        )
    _put(pages.codes, ids, torch.cat(coded, 1))
    _put(pages.positions, ids, positions)
    zeros = torch.zeros_like(positions).float()
    _put(pages.scores, ids, zeros if rows.scores is None else rows.scores[at, chosen].float())
    if pages.masses:
        _put(pages.log_masses, ids, zeros if rows.log_masses is None else rows.log_masses[at, chosen].float())


def _put(arenas: list[Tensor], ids: Tensor, rows: Tensor) -> None:
    """The first of the bytes or slots of whole pages, rows (P, n), into a list of arenas."""
    per = arenas[0].shape[0]
    for i in sorted(set((ids // per).tolist())):
        here = ids // per == i
        arenas[i][ids[here] - i * per, : rows.shape[1]] = rows[here]


def fixed_of(regions: PackedRegions, r: Tensor) -> Fixed | None:
    """The calibrated scales and zeros (P, 1, key_dim) of the keys of regions r (P,), where there are any."""
    scales, zeros = regions.key_scales, regions.key_zeros
    if scales is None or zeros is None:
        return None
    head = r % len(scales)
    return scales[head].float()[:, None], zeros[head].float()[:, None]
