"""Slots of pages in plain torch: reads, writes and copies, also for threads that only move pages."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from millpond.kernels.args import EntryRows, PaddedEntries, PageRegions
from millpond.kernels.pages import PageArrays


def slot_ids(pages: PageArrays, table: Tensor, slots: Tensor) -> Tensor:
    """Return flat slot ids, page * pages.slots + offset, of slots (R, n) of each region."""
    page = table.long().gather(1, slots // pages.slots)
    return page * pages.slots + slots % pages.slots


def gather(arenas: list[Tensor], ids: Tensor) -> Tensor:
    """Return rows of flat slot ids (any shape) out of arenas: ids.shape + row shape."""
    row_shape = arenas[0].shape[2:]
    per_arena = arenas[0].shape[0] * arenas[0].shape[1]
    out = arenas[0].new_empty(*ids.shape, *row_shape)
    for n, arena in enumerate(arenas):
        in_arena = ids // per_arena == n
        out[in_arena] = arena.reshape(-1, *row_shape)[ids[in_arena] - n * per_arena]
    return out


def scatter(arenas: list[Tensor], ids: Tensor, rows: Tensor) -> None:
    """Write rows (n, ...) to flat slot ids (n,) of a list of arenas."""
    row_shape = arenas[0].shape[2:]
    per_arena = arenas[0].shape[0] * arenas[0].shape[1]
    for n, arena in enumerate(arenas):
        in_arena = ids // per_arena == n
        arena.view(-1, *row_shape)[ids[in_arena] - n * per_arena] = rows[in_arena].to(arena.dtype)


def occupied(pages: PageArrays, table: Tensor, lens: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return flat slot ids (R, width), and whether each has an entry; empty ones are 0."""
    slots = torch.arange(width, device=table.device).expand(table.shape[0], width)
    valid = slots < lens[:, None]
    ids = slot_ids(pages, table, torch.where(valid, slots, 0)) if table.shape[1] else slots * 0
    return torch.where(valid, ids, 0), valid


def read(regions: PageRegions, width: int) -> PaddedEntries:
    pages, table, lens = regions.parts
    n = table.shape[0]
    if width == 0 or pages.n_arenas == 0:
        dev = table.device
        return PaddedEntries(
            torch.zeros(n, width, pages.key_dim, dtype=pages.dtype, device=dev),
            torch.zeros(n, width, pages.value_dim, dtype=pages.dtype, device=dev),
            torch.full((n, width), -1, dtype=torch.int32, device=dev),
            torch.zeros(n, width, device=dev),
            torch.zeros(n, width, device=dev) if pages.masses else None,
        )
    ids, valid = occupied(pages, table, lens, width)
    keys = gather(pages.keys, ids) * valid[..., None]
    values = gather(pages.values, ids) * valid[..., None]
    # an empty slot may hold anything, NaN too: select, never multiply
    keys = torch.where(valid[..., None], keys, 0)
    values = torch.where(valid[..., None], values, 0)
    positions = torch.where(valid, gather(pages.positions, ids), -1)
    scores = torch.where(valid, gather(pages.scores, ids), 0.0)
    log_masses = torch.where(valid, gather(pages.log_masses, ids), 0.0) if pages.masses else None
    return PaddedEntries(keys, values, positions, scores, log_masses)


def read_scores(regions: PageRegions, width: int) -> Tensor:
    pages, table, lens = regions.parts
    if width == 0 or pages.n_arenas == 0:
        return torch.zeros(table.shape[0], width, device=table.device)
    ids = table[:, : -(-width // pages.slots)].long()  # whole pages: far fewer than slots
    found = torch.empty(*ids.shape, pages.slots, device=table.device)
    for n, arena in enumerate(pages.scores):
        in_arena = ids // pages.pages_per_arena == n
        found[in_arena] = arena[ids[in_arena] - n * pages.pages_per_arena]
    valid = torch.arange(width, device=table.device) < lens[:, None]
    return torch.where(valid, found.flatten(1)[:, :width], 0.0)


def write(regions: PageRegions, rows: EntryRows) -> None:
    pages, table, index = regions.pages, regions.table, rows.index
    lane = torch.arange(index.shape[1], device=table.device).expand(index.shape)
    valid = lane < rows.count[:, None]
    if not bool(valid.any()):
        return
    region = torch.arange(table.shape[0], device=table.device)[:, None].expand(index.shape)[valid]
    ids = slot_ids(pages, table, torch.where(valid, rows.start[:, None].long() + lane, 0))[valid]
    row = index.long()[valid]
    none = torch.zeros(1, 1, device=table.device).expand(rows.positions.shape)
    scores, log_masses = (none if source is None else source for source in (rows.scores, rows.log_masses))
    side = (rows.keys, rows.values, rows.positions, scores, log_masses)
    for arenas, source in zip(pages.arrays, side, strict=False):
        scatter(arenas, ids, source[region, row])


Rows = npt.NDArray[np.integer[Any]]
#: Number types in which rows are copied, with their widths in bytes, the widest first.
_WIDTHS = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))


def take_rows(source: Tensor, rows: Rows) -> Tensor:
    """Return rows (n,) of source (N, ...), on the CPU, as a copy (n, ...)."""
    if not source.is_cpu or not source.is_contiguous():
        return source[torch.from_numpy(rows).long().to(source.device)].cpu()
    rows_read = torch.empty(len(rows), *source.shape[1:], dtype=source.dtype)
    if rows_read.numel():
        elements, bytes_view = _whole(source, rows_read)
        np.take(elements, rows, axis=0, out=bytes_view, mode="clip")
    return rows_read


def put_rows(target: Tensor, rows: Rows, source: Tensor, places: Rows | None = None) -> None:
    """Write source (n, ...), or its rows `places` (n,), to rows (n,) of target (N, ...)."""
    if target.is_cpu and target.is_contiguous() and source.is_cpu and source.is_contiguous():
        if source.numel() and len(rows):
            elements, bytes_view = _whole(source, target)
            bytes_view[rows] = elements if places is None else elements[places]
        return
    own_rows = source if places is None else source[torch.from_numpy(places).to(source.device)]
    target[torch.from_numpy(rows).long().to(target.device)] = own_rows.to(target.device)


def _whole(*tensors: Tensor) -> list[npt.NDArray[Any]]:
    """Return rows of tensors (N, ...) as numbers as wide as their bytes and addresses allow.

    The rows must be contiguous and of one size.
    """
    flat = [x.detach().view(len(x), -1).view(torch.uint8) for x in tensors]
    numbers = [flat[0].shape[1], *(x.data_ptr() for x in tensors)]
    kind = next(kind for width, kind in _WIDTHS if not any(number % width for number in numbers))
    return [x.view(kind).numpy() for x in flat]
