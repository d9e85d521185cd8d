"""Quantized part of a table's regions: entries as codes, in pages of a pool of their own.

A quantized entry is never encoded again while its page lives. An evicted entry becomes a tombstone, position -1 in its
slot; a page whose slots are all dead returns to the pool. See docs/explanation/packed-pages.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from millpond.cache.pages import page_lists
from millpond.cache.pages.page_lists import PageLists, Rows
from millpond.cache.pages.quantized_regions import Ints, QuantizedRegions
from millpond.cache.pages.ref_counted_pool import PageIds
from millpond.errors import PoolFullError
from millpond.kernels import ops
from millpond.kernels.args import EntryRows, PaddedEntries
from millpond.kernels.eager.pages import scatter
from millpond.kernels.transfers import shares_memory


@dataclass(frozen=True, slots=True)
class NewCodes:
    """Entries of a sequence to quantize.

    Attributes:
        count: Number of entries of each KV head, (H,), on the host.
        index: Their rows of `entries`, (H, width); each head has `count` of them.
        entries: Entries as numbers, among others.
    """

    count: Ints
    index: Tensor
    entries: PaddedEntries


class QuantizedStore(QuantizedRegions):
    """Quantized part of regions, to which entries are written and from which they are evicted."""

    @property
    def parts(self) -> tuple[QuantizedStore, ...]:
        """Stores of the tiers by age: here one."""
        return (self,)

    # ------------------------------------------------------------------ writing

    def collect_statistics(
        self, sequence: int, q: Tensor, k: Tensor, outputs: Tensor | None = None, norms: Tensor | None = None
    ) -> None:
        """Add prompt tokens to the statistics of channels, see `KeyChannels.collect`.

        They count until the first entries of the sequence are quantized.
        """
        self._keys.collect(sequence, q, k, outputs, norms)

    def absorb(
        self,
        sequence: int,
        new: NewCodes | None = None,
        *,
        kept: Tensor | None = None,
        scores: Tensor | None = None,
        emptied: npt.NDArray[np.bool_] | None = None,
        write_rest: Callable[[], None] | None = None,
    ) -> None:
        """Quantize entries of a sequence after its quantized ones, and evict others.

        Args:
            sequence: Sequence in the table.
            new: Entries to quantize; None for none.
            kept: Which entries of the slots in use now stay, (H, n) bool; others become tombstones. None for all.
            scores: Accumulators of the entries that stay, (H, n) float32; None to leave them.
            emptied: Pages in use now to free, (H, pages) bool; their entries are dead, or in `new`.
            write_rest: Writes the entries that are not quantized, once there is room for those that are.

        Raises:
            PoolFullError: a pool is full; nothing was changed.
            NumericsError: a number that the format cannot hold.
        """
        rows = self.rows(sequence)
        lens = self.lens[rows].copy()
        before = max((t.shape[1] for t in (kept, scores) if t is not None), default=0)
        alive = self.positions(rows)[:, :before] >= 0 if before else None
        if new is not None:
            self.write_all(np.array([sequence]), new.count, new.index.int().contiguous(), new.entries)
        try:
            if write_rest is not None:
                write_rest()
        except PoolFullError:
            self.lens[rows] = lens
            self._pages.cut(rows, -(-lens // self.slots))
            self._changed()
            raise
        if kept is not None and alive is not None:  # of a shorter head the first of `new` lie in these slots
            self.mark_evicted(rows, alive & ~kept)
            alive = alive & kept
        if scores is not None and alive is not None:
            self.rescore(rows, scores, alive & (scores != self.scores(rows)[:, :before]))
        if emptied is not None:
            self._drop_pages(rows, emptied)

    def write_all(self, sequences: npt.NDArray[np.int64], count: Ints, index: Tensor, entries: PaddedEntries) -> None:
        """Quantize entries of several sequences, after the quantized ones of their regions.

        Args:
            sequences: Sequences in the table, (s,).
            count: Entries of each of their n regions, (n,), on the host.
            index: Rows of `entries` to quantize, (n, width) int32.
            entries: Entries as numbers.
        """
        more = count.astype(np.int32)
        if not more.any():
            return
        for sequence in sequences.tolist():
            self._keys.choose(sequence)
        rows = (sequences[:, None] * self.n_kv_heads + np.arange(self.n_kv_heads)).ravel()
        self._copy_ends(rows)
        self._reserve(rows, self.lens[rows] + more)
        if self._rope is not None:
            self._rope.reach(int(entries.positions.max()) + 1)
        runs = np.stack([self.lens[rows], more])
        start, taken = self._there(runs)
        its_rows = self.rows(int(sequences[0])) if len(sequences) == 1 else rows
        given = EntryRows(start, taken, index, *entries, on_host=(runs[0], runs[1]))
        ops.write_packed(self.regions(its_rows), given)
        self.lens[rows] += more
        self._changed()

    @property
    def is_plain(self) -> bool:
        """Whether its regions differ from those of other layers in nothing but their pages.

        The codes of such layers are written together.
        """
        layout, codec = self.pool.arrays.layout, self.codec
        across = layout.key.across_heads or layout.value.across_heads
        return not (across or codec.balanced or codec.prune or codec.prune_values or self._rope or self._fixed)

    def begin(self, count: Ints) -> None:
        """Give an empty store the pages for count (R,) entries, which are written next.

        Raises:
            PoolFullError: the pool is full; nothing was changed.
        """
        assert not self.lens.any(), "it has no codes yet"
        self._reserve(np.arange(len(count)), count)
        self.lens[:] = count
        self._changed()

    def mark_evicted(self, rows: Rows, leave: Tensor) -> None:
        """Make tombstones of entries of some regions, leave (n, <= width) bool by slot."""
        if not bool(leave.any()):
            return
        self.copy_on_write()
        ids, _ = self.slot_ids(rows)
        target = ids[:, : leave.shape[1]][leave]
        scatter(self.pool.arrays.positions, target, torch.full_like(target, -1, dtype=torch.int32))
        self.n_evicted[rows] += leave.sum(1).cpu().numpy().astype(np.int32)
        self._changed()

    def rescore(self, rows: Rows, scores: Tensor, mask: Tensor) -> None:
        """Give entries of some regions, mask (n, <= width) bool by slot, new accumulators.

        `scores` has the shape of the mask.
        """
        if bool(mask.any()):
            self.copy_on_write()
            ids = self.slot_ids(rows)[0][:, : mask.shape[1]]
            scatter(self.pool.arrays.scores, ids[mask], scores[mask].float())

    def renumber(self, rows: Rows, positions: Tensor) -> None:
        """Give the entries of some regions positions (n, width); -1 for no entry.

        Their keys are stored before RoPE.
        """
        if self.lens[rows].any():
            self.copy_on_write()
            ids, used = self.slot_ids(rows)
            scatter(self.pool.arrays.positions, ids[used], positions[used].int())

    def sparse(self, rows: slice, leaving: Tensor | None = None, *, whole: bool = False) -> npt.NDArray[np.bool_]:
        """Return which full pages of some regions are worth freeing, (n, pages).

        A page is if at least half of its slots are dead.

        Args:
            rows: Regions.
            leaving: Slots that count as dead too, (n, width) bool; None for none.
            whole: Whether to return pages without any live slot instead.
        """
        slots, n_pages = self.slots, -(-int(self.lens[rows].max(initial=0)) // self.slots)
        if leaving is None and not self.n_evicted[rows].any():
            return np.zeros((rows.stop - rows.start, n_pages), dtype=bool)
        dead_slots = self.positions(rows) < 0
        dead_slots = dead_slots if leaving is None else dead_slots | leaving
        dead = torch.nn.functional.pad(dead_slots, (0, n_pages * slots - dead_slots.shape[1]))
        counts = dead.view(len(dead_slots), n_pages, slots).sum(2).cpu().numpy()
        full = np.arange(n_pages) < (self.lens[rows] // slots)[:, None]
        sparse: npt.NDArray[np.bool_] = full & (counts >= slots if whole else 2 * counts >= slots)
        return sparse

    def pages_of(self, rows: slice, chosen: npt.NDArray[np.bool_]) -> PaddedEntries:
        """Return the entries of the `chosen` pages (n, pages) of some regions as numbers, by slot."""
        max_pages = int(chosen.sum(1).max(initial=0))
        page_ids = np.zeros((len(chosen), max(max_pages, 1)), dtype=np.int32)
        lens = np.zeros(len(chosen), dtype=np.int32)
        for r in np.flatnonzero(chosen.any(1)).tolist():
            columns = np.flatnonzero(chosen[r])
            page_ids[r, : len(columns)] = self._pages.ids[rows.start + r, columns]
            lens[r] = np.minimum(self.lens[rows.start + r] - columns * self.slots, self.slots).sum()
        regions = self.regions(rows)
        part = replace(regions, table=self._there(page_ids), lens=self._there(lens))
        return ops.read_packed(part, int(lens.max(initial=0)), self.head_dim)

    def forget(self, sequence: int) -> None:
        """Free all pages of a sequence."""
        rows = self.rows(sequence)
        self._pages.cut(rows, 0)
        self.lens[rows], self.n_evicted[rows] = 0, 0
        self._changed()

    def stepped(self, buries: bool) -> None:
        """Update the counters after a decoding step that may have written tombstones (`buries`)."""
        self.steps_until_check -= 1
        self._behind |= buries and not shares_memory(self._device)

    # ------------------------------------------------------------------ sharing

    def begin_with(self, pages: PageIds) -> None:
        """Begin the only sequence with full pages (Hkv, n) that others hold too."""
        assert self.n_seq == 1, "a prompt"
        assert not self.lens.any(), "it has no codes yet"
        self._pages = PageLists.of_held(self.pool, pages)
        self.lens[:] = pages.shape[1] * self.slots
        self.steps_until_check = 0
        self._changed()
        if self._rope is not None:
            self._rope.reach(int(self.positions(slice(None)).max()) + 1)

    def share(self) -> None:
        """Note that another holder shares some of these pages from now on."""
        self._pages.share()
        self._runs_current = False

    def select(self, sequences: list[int]) -> None:
        """Keep the given sequences, in this order; the pages of one named many times are shared."""
        regions = np.concatenate([np.arange(len(self.lens))[self.rows(s)] for s in sequences])
        self._pages.select(regions)
        self.lens, self._dead = self.lens[regions], self.n_evicted[regions]
        self._keys.select(sequences, regions)
        self.n_seq, self.steps_until_check = len(sequences), 0
        self._changed()

    def fork(self) -> QuantizedStore:
        """Return a store of the same entries; pages are shared until one of the two writes."""
        other = QuantizedStore(
            self.codec,
            self.pool,
            self.n_seq,
            self.n_kv_heads,
            self.head_dim,
            self.value_dim,
            fixed=self._fixed,
            rope=self._rope,
            key_scales=None if self.basis is None else self.basis.scales,
        )
        other._pages = self._pages.fork()
        other.lens, other._dead = self.lens.copy(), self.n_evicted.copy()
        other._keys = self._keys.copy()
        return other

    def copy_on_write(self) -> None:
        """Copy every shared page, before a write or a step that writes scores or tombstones.

        Raises:
            PoolFullError: no room for the copies; nothing was changed.
        """
        if self._pages.may_share and self._pages.copy_on_write():
            self._changed()

    def _copy_ends(self, rows: npt.NDArray[np.int64]) -> None:
        """Copy the shared pages of some regions in which their next entries lie."""
        if not self._pages.may_share:
            return
        ends = page_lists.written(self._pages, self.lens, whole=False)
        assert ends is not None, "not all pages are written"
        ends[np.setdiff1d(np.arange(len(ends)), rows)] = False
        if self._pages.copy_on_write(ends):
            self._changed()

    def clear(self) -> None:
        """Release every page."""
        self._pages.clear()
        self.lens[:], self.n_evicted[:] = 0, 0
        self._changed()

    def join(self, other: QuantizedStore) -> None:
        """Take the sequences of another store of this pool, after these, and empty it."""
        self._pages.join(other._pages)
        self._dead = np.concatenate([self.n_evicted, other.n_evicted])
        self.lens = np.concatenate([self.lens, other.lens])
        self._keys.join(other._keys)
        self.n_seq, self.steps_until_check = self.n_seq + other.n_seq, 0
        self._changed()
        other.clear()

    def release_all(self) -> npt.NDArray[np.int64]:
        """Release every page and keep the rest, for `restore`; return the pages per region."""
        return self._pages.release_all()

    def restore(self, ids: PageIds, owned: npt.NDArray[np.int64]) -> None:
        """Hold pages after `release_all`: `ids` in the order of `held`, `owned` of each region."""
        self._pages.restore(ids, owned)
        self._changed()

    def numbers(self) -> dict[str, Tensor]:
        """Return the tables of the pages without their content, for `adopt`."""
        counts = {"owned": self._pages.owned, "lens": self.lens, "dead": self.n_evicted}
        tables = {name: torch.from_numpy(n) for name, n in counts.items()}
        reach = None if self._rope is None else torch.tensor(self._rope.tables.positions)
        named = tables | self._keys.tables | {"reach": reach}
        return {name: t.clone() for name, t in named.items() if t is not None}

    def adopt(self, numbers: dict[str, Tensor]) -> PageIds:
        """Become the store of one sequence that gave `numbers`, in fresh pages.

        Returns:
            The pages, in the order of `held`.

        Raises:
            PoolFullError: there is no room.
        """
        owned = numbers["owned"].cpu().numpy()
        self._reserve(np.arange(len(owned)), (owned * self.slots).astype(np.int32))
        self.lens, self._dead = (numbers[name].cpu().numpy().astype(np.int32) for name in ("lens", "dead"))
        self._keys.adopt(*(numbers.get(name) for name in ("channels", "balance", "value_channels")))
        self._changed()
        if self._rope is not None:
            self._rope.reach(int(numbers["reach"]))
        return self.held()

    # ------------------------------------------------------------------ internal

    def _drop_pages(self, rows: slice, chosen: npt.NDArray[np.bool_]) -> None:
        """Give the `chosen` pages (n, pages) of some regions back, with all that lies in them."""
        if not chosen.any():
            return
        positions = self.positions(rows).cpu().numpy()
        for r in np.flatnonzero(chosen.any(1)).tolist():
            row, columns = rows.start + r, np.flatnonzero(chosen[r])
            for column in columns.tolist():
                part = slice(column * self.slots, min((column + 1) * self.slots, int(self.lens[row])))
                self.n_evicted[row] -= int((positions[r, part] < 0).sum())
            self.lens[row] -= int(np.minimum(self.lens[row] - columns * self.slots, self.slots).sum())
        self._pages.drop(rows, chosen)
        self._changed()

    def _reserve(self, rows: npt.NDArray[np.int64], lens: Ints) -> None:
        self._pages.grow(rows, np.maximum(-(-lens // self.slots) - self._pages.owned[rows], 0))
        self._changed()
