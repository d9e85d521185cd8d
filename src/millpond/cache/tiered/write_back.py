"""Write-back of a table's pages to the disk after a pass: pages to write, and patches that stay in memory."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from millpond.cache.pages.ref_counted_pool import PageIds, RefCountedPool
from millpond.cache.swap import Holder, read_pages, write_pages
from millpond.cache.tiered.offloaded_pages import NOTHING, OffloadedPages
from millpond.cache.tiered.page_fetch import PageFetch, lists_with, once
from millpond.errors import DataError
from millpond.kernels.page_rows import PagePart, RowArrays, pack_run, take
from millpond.kernels.pages import PageArrays

#: Entries of a region that wait in memory, at most, before the pages of its sequence are written again.
MAX_PATCHES = 24
#: Bytes of an entry that waits besides keys and values: its page and slot.
_PATCH_BYTES = 12

Mask = npt.NDArray[np.bool_]


def write_back(
    part: Holder, offloaded: OffloadedPages, fetch: PageFetch | None, *, appends: bool, rewritten: Mask | None
) -> dict[int, DataError]:
    """Let a part hold pages of `offloaded` in place of those of its pool, and release these.

    An unchanged page keeps its run. Entries that were written into some of its slots wait in memory as patches, until a
    region of its sequence has `MAX_PATCHES` of them; then all pages of the sequence are written again.

    Args:
        part: Plain or quantized part of a table.
        offloaded: Pool that holds the pages between passes.
        fetch: Fetch that read the pages; None if they are new.
        appends: Whether entries are only added, so that a page that is not full stays in the pool.
        rewritten: Sequences all of whose entries have changed, (n_seq,) bool; None for none.

    Returns:
        Errors of the sequences whose pages could not be written.

    Raises:
        PoolFullError: the limit has no room for positions and scores.
    """
    lists, pool = part.page_lists, part.pool
    pages, inverse, counts = once(lists)
    region = np.repeat(np.arange(len(lists.owned)), lists.owned)
    column = np.arange(len(region)) - np.repeat(np.cumsum(lists.owned) - lists.owned, lists.owned)
    if len(pages) < len(inverse):
        first = np.zeros(len(pages), dtype=np.int64)
        first[inverse[::-1]] = np.arange(len(inverse))[::-1]
        region, column = region[first], column[first]
    used = np.clip(part.region_lengths[region] - column * pool.slots, 0, pool.slots)
    sequence = region // part.n_kv_heads
    place = np.full(len(pages), -1) if fetch is None else fetch.find(pool, pages)
    if fetch is not None and appends and rewritten is None:  # nothing can have changed in pages that were full
        may_change = np.ones(len(pages), dtype=bool)
        may_change[place >= 0] = ~fetch.full[place[place >= 0]]
        some = np.flatnonzero(may_change)
    else:
        some = np.arange(len(pages))
    sides = read_pages(pool, pages[some], PagePart.SIDES)
    if len(some):  # by numpy, here and below: torch would wake its threads for it
        sides[0].numpy()[np.arange(pool.slots) >= used[some, None]] = NOTHING
    changed = np.zeros((len(pages), pool.slots), dtype=bool)
    alone = np.ones(len(pages), dtype=bool)
    fetched = some[place[some] >= 0]
    if fetch is not None and len(fetched):
        ids = fetch.ids[place[fetched]]
        positions = sides[0].numpy()[place[some] >= 0]
        changed[fetched] = positions >= 0
        if rewritten is None or not rewritten.all():
            (before,) = take(RowArrays.of_tensors(offloaded.arrays.positions), ids)
            same = positions == before.numpy()
            changed[fetched] &= ~same if rewritten is None else (~same | rewritten[sequence[fetched], None])
        alone[fetched] = offloaded.refs(ids) == fetch.counts[place[fetched]]
        place[fetched[~alone[fetched] & changed[fetched].any(1)]] = -1  # others keep what it was
    fresh = place < 0
    changed[fresh] = False
    loose = fresh.copy()  # content that is nowhere but in the page
    if fetch is not None:
        loose[~fresh] = fetch.moved[place[~fresh]]
    stays = loose & appends & (used < pool.slots)
    written = loose & ~stays
    patched = changed.any(1) & ~loose
    ids = np.zeros(len(pages), dtype=np.int32)
    if fetch is not None:
        ids[~fresh] = fetch.ids[place[~fresh]]
        _hold(offloaded, fetch, place, ids[inverse], ~fresh[inverse])
    ids[fresh] = offloaded.allocate(int(fresh.sum()))
    offloaded.retain(np.repeat(ids[fresh], counts[fresh] - 1))
    noted = fresh[some] | alone[some]
    if not noted.all():
        sides = tuple(take(RowArrays.of_tensors(sides), np.flatnonzero(noted)))
    write_pages(offloaded, ids[some[noted]], sides)
    if not patched.any():
        anew = patched
    elif _slotwise(pool):
        due = _due(part, offloaded, ids, region, changed & patched[:, None])
        anew = due[sequence] & ~stays & alone
    else:
        anew = patched
    written |= anew
    patched &= ~anew
    if patched.any():
        which, slots = np.nonzero(changed & patched[:, None])
        rows = pages[which].astype(np.int64) * pool.slots + slots
        offloaded.patches.put(ids[which], slots, take(RowArrays.of_slots(pool.arrays), rows))
    lost = _write(pool, offloaded, pages, ids, sequence, written)
    pool.retain(pages[stays])
    offloaded.set_resident(ids[stays], pages[stays])
    pool.release(pages[inverse])
    part.exchange(lists_with(part, offloaded, ids[inverse]))
    return lost


def _hold(
    offloaded: OffloadedPages, fetch: PageFetch, place: npt.NDArray[np.int64], ids: PageIds, fetched: Mask
) -> None:
    """Release the pages of `offloaded` that a fetch holds, and retain those that stay.

    Args:
        offloaded: Pool that holds the pages between passes.
        fetch: Fetch that read the pages.
        place: Places in the fetch of the pages of the part, (n,); -1 for other pages.
        ids: Pages of `offloaded` that the part will hold, (held,).
        fetched: Whether the fetch held them, (held,).
    """
    held, fetch.held = fetch.held, fetch.held[:0]
    if len(held) == len(fetch.ids) and len(ids) == len(place):  # each once, before and after: most stay as they are
        evicted = np.ones(len(held), dtype=bool)
        evicted[place[fetched]] = False
        offloaded.release(fetch.ids[evicted])
    else:
        offloaded.retain(ids[fetched])
        offloaded.release(held)


def _due(part: Holder, offloaded: OffloadedPages, ids: PageIds, region: npt.NDArray[np.int64], changed: Mask) -> Mask:
    """Return the sequences whose pages are written again, (n_seq,) bool.

    One of their regions has too many patches, or memory has no room for them.
    """
    n_seq = len(part.region_lengths) // part.n_kv_heads
    contents = part.pool.arrays.contents
    by_region = np.zeros(len(part.region_lengths), dtype=np.int64)
    np.add.at(by_region, region, changed.sum(1) + offloaded.patches.counts(offloaded.n_pages)[ids])
    max_patches: npt.NDArray[np.int64] = by_region.reshape(n_seq, part.n_kv_heads).max(1)
    row_bytes = _PATCH_BYTES + sum(arenas[0].shape[2] * arenas[0].element_size() for arenas in contents if arenas)
    due: Mask = max_patches > MAX_PATCHES
    if not _has_room(offloaded, int(changed.sum()) * row_bytes):
        due = max_patches > 0
    return due


def _has_room(offloaded: OffloadedPages, nbytes: int) -> bool:
    """Whether the limit of the pool has room for `nbytes` more."""
    memory_limit = offloaded.memory_limit
    limit = None if memory_limit is None else memory_limit.limit_bytes
    return memory_limit is None or limit is None or memory_limit.nbytes + nbytes <= limit


def _slotwise(pool: RefCountedPool[Any]) -> bool:
    """Whether an entry is a row of each array; codes are spread over a page."""
    return isinstance(pool.arrays, PageArrays)


def _write(
    pool: RefCountedPool[Any],
    offloaded: OffloadedPages,
    pages: PageIds,
    ids: PageIds,
    sequence: npt.NDArray[np.int64],
    written: Mask,
) -> dict[int, DataError]:
    """Write pages, those of a sequence together; return errors by sequence."""
    lost: dict[int, DataError] = {}
    content = RowArrays.of_pages(pool.arrays, PagePart.CONTENTS)
    max_pages = offloaded.extents.transit.slot_bytes // pool.kv_bytes_per_page
    for which in _parts(sequence, np.flatnonzero(written), max_pages):
        written_pages = pages[which]
        try:
            run = offloaded.extents.write(
                partial(pack_run, content, written_pages),
                len(written_pages) * pool.kv_bytes_per_page,
                len(written_pages),
            )
        except DataError as error:
            lost[int(sequence[which[0]])] = error
            offloaded.drop_content(ids[which])
        else:
            offloaded.set_run(ids[which], run)
    return lost


def _parts(
    sequence: npt.NDArray[np.int64], selected: npt.NDArray[np.int64], max_pages: int
) -> Iterator[npt.NDArray[np.int64]]:
    """Yield the selected pages of each sequence, in parts of at most `max_pages` pages."""
    selected = selected[np.argsort(sequence[selected], kind="stable")]
    for pages in np.split(selected, np.flatnonzero(np.diff(sequence[selected])) + 1) if len(selected) else []:
        for begin in range(0, len(pages), max_pages):
            yield pages[begin : begin + max_pages]
