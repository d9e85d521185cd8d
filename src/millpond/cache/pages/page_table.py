"""Page table of one layer: the pages of every region (KV head of a sequence), its length and its budget."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from millpond.cache.pages import page_lists, publishing
from millpond.cache.pages.aged_store import AgedStore, QuantizedPart
from millpond.cache.pages.page_lists import PageLists
from millpond.cache.pages.pool import PageIds, PagePool
from millpond.cache.pages.quantized_store import QuantizedStore
from millpond.cache.pages.ref_counted_pool import RefCountedPool
from millpond.cache.pages.region_arrays import Ints, RegionBudgets, RegionLengths
from millpond.cache.pages.shared_prefix import SharedPrefixRuns
from millpond.codec.basis import Basis
from millpond.errors import PoolFullError
from millpond.kernels.args import AttentionShape, PageRegions, StepRegions
from millpond.kernels.decode_rules import DecodeRule
from millpond.kernels.eager.pages import gather, occupied
from millpond.kernels.transfers import on_device, shares_memory

#: Steps before a page of entries may be due to be quantized, at which the host begins to ask for its length.
LOOK_AHEAD = 2


class PageTable:
    """Tables of `n_seq * n_kv_heads` regions over one pool.

    The kernels read `pages`, `lens`, `capacities` and `recent` on the pool's device; the host has its own copy of each
    (on the CPU the two are one memory), so that no step waits for a device.

    Args:
        pool: Pool of the plain pages.
        n_seq: Number of sequences.
        n_kv_heads: KV heads of the layer.
        quantized: Entries of the regions that are stored as codes; None if none are.

    Attributes:
        pages: Page ids, (R, n) int32.
        lens: Entries in plain pages, (R,) int32.
        capacities: Most entries that a region may hold, (R,) int32.
        regions: Pages and lengths together, as the ops take them.
        recent: How many newest positions are protected, (R,) int32.
        head_rules: Rule of each region, (R,) int64; 0 if the policy gives heads no rules of their own.
        quantized: Entries of the regions that are stored as codes; None if none are. All other attributes describe the
            plain part.
        kept: Kept spans of the next step, see `StepRegions`.
        least: Fair shares of the next step, see `StepRegions`.
    """

    def __init__(self, pool: PagePool, n_seq: int, n_kv_heads: int, quantized: QuantizedPart | None = None) -> None:
        self.pool = pool
        self.quantized = quantized
        self.kept: Tensor | None = None
        self.least: Tensor | None = None
        self.n_seq, self.n_kv_heads = n_seq, n_kv_heads
        n = n_seq * n_kv_heads
        self._rows = PageLists(pool, n)
        self._lengths = RegionLengths(np.zeros(n, dtype=np.int32))
        self._budgets = RegionBudgets.unbounded(n)
        self._slack = 0  # decoding steps until some region may need a page
        self._runs: SharedPrefixRuns | None = None
        self._runs_current = True
        self.pages: Tensor = torch.empty(n, 0, dtype=torch.int32)
        self._publish()
        pool.holders.add(self)

    @classmethod
    def of_pages(cls, pool: PagePool, pages: PageIds) -> PageTable:
        """Return a table of one sequence with full pages (n_kv_heads, n) that others hold too."""
        table = cls(pool, 1, len(pages))
        table._rows = PageLists.of_held(pool, pages)
        table._lengths.host[:] = pages.shape[1] * pool.slots
        table._publish()
        return table

    # ------------------------------------------------------------------ views

    @property
    def n_regions(self) -> int:
        return len(self._rows.owned)

    @property
    def basis(self) -> Basis | None:
        """Basis of the numbers in both parts; None if they are as the model computes them."""
        return None if self.quantized is None else self.quantized.basis

    @property
    def packed_parts(self) -> tuple[QuantizedStore, ...]:
        """Stores of its codes, the newest first: one of each tier by age; () if it has none."""
        return () if self.quantized is None else self.quantized.parts

    @property
    def aged(self) -> AgedStore | None:
        """Its codes if they are in several tiers by age, which no kernel reads together; else None."""
        return self.quantized if isinstance(self.quantized, AgedStore) else None

    @property
    def unplanned(self) -> bool:
        """Whether its plain pages hold a prompt until its plan, which moves kept entries to others."""
        return self.pool.until_plan

    @property
    def is_behind(self) -> bool:
        """Whether the device knows newer numbers of entries than the host."""
        return self._lengths.behind or any(part.is_behind for part in self.packed_parts)

    def newer_counts(self) -> list[Tensor]:
        """Return the plain entries, then the tombstones of each tier of codes.

        Each is (R,) int32 on the device.
        """
        return [self.lens, *(part.regions().dead for part in self.packed_parts)]

    def lengths(self) -> npt.NDArray[np.int32]:
        """Return the number of entries in plain pages, (n_seq, n_kv_heads), on the host."""
        return self._lengths.host.reshape(self.n_seq, self.n_kv_heads).copy()

    def entries(self) -> npt.NDArray[np.int32]:
        """Return the number of entries in both parts, (n_seq, n_kv_heads), on the host."""
        return self.lengths() if self.quantized is None else self.lengths() + self.quantized.live

    def budgeted(self) -> npt.NDArray[np.int32]:
        """Return how many entries count against the budget, (n_seq, n_kv_heads), on the host.

        Entries of a lower tier do not.
        """
        if self.quantized is None or not self.quantized.codec.tiered:
            return self.entries()
        above: npt.NDArray[np.int32] = sum((part.live for part in self.packed_parts[:-1]), self.lengths())
        return above

    def newest_protected(self) -> npt.NDArray[np.int32]:
        """Return how many newest positions are protected, (n_seq, n_kv_heads), on the host."""
        return self._budgets.recent.reshape(self.n_seq, self.n_kv_heads).copy()

    def rows(self, sequence: int) -> slice:
        """Return the regions of one sequence."""
        return slice(sequence * self.n_kv_heads, (sequence + 1) * self.n_kv_heads)

    def regions_of(self, rows: slice | Tensor) -> PageRegions:
        """Return the plain pages and lengths of some regions, see `regions`."""
        return PageRegions(self.pool.arrays, self.pages[rows], self.lens[rows])

    def plain_positions(self, rows: slice) -> Tensor:
        """Return the positions in the slots of plain pages of some regions, (n, width) int32.

        A slot without an entry has position -1.
        """
        width = int(self._lengths.host[rows].max(initial=0))
        arrays = self.pool.arrays
        if not width or not arrays.n_arenas:
            return torch.full((rows.stop - rows.start, width), -1, dtype=torch.int32, device=arrays.device)
        ids, valid = occupied(arrays, self.pages[rows], self.lens[rows], width)
        return torch.where(valid, gather(arrays.positions, ids), -1)

    def step_regions(self, rule: DecodeRule, shape: AttentionShape, q_pos: Tensor) -> StepRegions:
        """Return all regions at a decoding step of tokens at positions q_pos (S,)."""
        packed = None if self.quantized is None else self.quantized.regions()
        return StepRegions(
            self.regions, self.capacities, self.recent, q_pos, rule, shape, packed, self.kept, self.least
        )

    @property
    def page_lists(self) -> PageLists:
        """Pages of the regions: of `pool` or, while they are offloaded, of the pool of offloaded pages."""
        return self._rows

    @property
    def region_lengths(self) -> Ints:
        """Entries in plain pages, (R,), on the host."""
        return self._lengths.host

    @property
    def is_offloaded(self) -> bool:
        """Whether the content of its plain pages is offloaded, so that nothing may read or write it."""
        return self._rows.pool is not self.pool

    @property
    def device(self) -> torch.device:
        """See `publishing.Numbers`."""
        return self.pool.arrays.device

    @property
    def page_ids(self) -> PageIds:
        """See `publishing.Numbers`."""
        return self._rows.ids

    @property
    def region_numbers(self) -> tuple[Ints, Ints, Ints, npt.NDArray[np.int64]]:
        """See `publishing.Numbers`."""
        return self._lengths.host, *self._budgets

    def adopt(self, pages: Tensor, lens: Tensor, capacities: Tensor, recent: Tensor, head_rules: Tensor) -> None:
        """See `publishing.Numbers`."""
        self.pages, self.lens, self._runs_current = pages, lens, False
        self._lengths.adopt(lens)
        self.capacities, self.recent, self.head_rules = capacities, recent, head_rules
        self.regions = PageRegions(self.pool.arrays, pages, lens)

    def exchange(self, lists: PageLists) -> None:
        """Hold other pages with the same content, as many in each region.

        The caller releases the previous ones.
        """
        self._rows = lists
        self._publish(lens=False, budgets=False)

    def held(self) -> PageIds:
        """Return the page ids of all regions, a shared page once per holder."""
        return self._rows.held()

    def held_in(self, pool: RefCountedPool[Any]) -> list[PageIds]:
        """See `PageHolder`."""
        return [self._rows.held()] if self._rows.pool is pool else []

    def follow(self, pool: RefCountedPool[Any], new_ids: PageIds) -> None:
        """See `PageHolder`."""
        if self._rows.pool is pool:
            self._rows.follow(new_ids)
            self._publish(lens=False, budgets=False)

    def page_column(self, number: int) -> PageIds:
        """Return the id of the `number`-th page of each region, (R,)."""
        return self._rows.ids[:, number].copy()

    # ------------------------------------------------------------------ budgets

    def set_budget(self, sequence: int, capacities: Ints, recent: Ints | int) -> None:
        """Set how many entries each head of a sequence may hold, and how many newest it protects."""
        rows, self._slack = self.rows(sequence), 0
        self._budgets.capacities[rows], self._budgets.recent[rows] = capacities, recent
        self._publish(ids=False, lens=False)

    def set_head_rules(self, sequence: int, kinds: npt.NDArray[np.int64] | int, recent: Ints | int) -> None:
        """Set the rule of each head of a sequence, and how many newest entries some rules keep."""
        rows = self.rows(sequence)
        self._budgets.head_rules[rows], self._budgets.recent[rows] = kinds, recent
        self._publish(ids=False, lens=False)

    def budgets(self) -> Ints:
        """Return how many entries each head may hold, (n_seq, n_kv_heads), on the host."""
        return self._budgets.capacities.reshape(self.n_seq, self.n_kv_heads).copy()

    def rules(self) -> npt.NDArray[np.int64]:
        """Return the rule of each head, (n_seq, n_kv_heads), on the host."""
        return self._budgets.head_rules.reshape(self.n_seq, self.n_kv_heads).copy()

    def set_budgets(self, capacities: Ints) -> None:
        """Set how many entries each head may hold, (n_seq, n_kv_heads)."""
        self._budgets.capacities[:] = capacities.ravel()
        self._slack = 0
        self._publish(ids=False, lens=False)

    # ------------------------------------------------------------------ room

    def reserve(self, sequence: int, lens: Ints) -> None:
        """Give each head of a sequence the pages for `lens` entries, neighbours where possible.

        Raises:
            PoolFullError: the pool is full; nothing was changed.
        """
        rows = self.rows(sequence)
        self._rows.grow(np.arange(rows.start, rows.stop), page_lists.lacking(self._rows, rows, lens))
        self._publish(lens=False, budgets=False)

    def make_room(self, grows_always: bool, n: int = 1) -> None:
        """Allocate pages for every region that may grow by an entry in each of the next `n` steps.

        Raises:
            PoolFullError: the pool is full; nothing was changed.
        """
        lens = self.most_entries()
        if self._slack >= n:
            return
        growing = np.full(self.n_regions, True) if grows_always else self._lengths.known < self._budgets.capacities
        if self.quantized is not None:  # a victim among the codes leaves no plain slot for the new entry
            growing |= self.quantized.may_live
        spare = self._rows.owned * self.pool.slots - lens
        needy = np.flatnonzero(growing & (spare < n))
        if len(needy):
            more = -(-(n - spare[needy]) // self.pool.slots)
            self._rows.grow(needy, more)
            spare[needy] += more * self.pool.slots
            self._publish(lens=False, budgets=False)
        self._slack = int(spare[growing].min()) if growing.any() else 2**30

    def pages_for_step(self, grows_always: bool, whole: bool) -> int:
        """Return the most pages that the next decoding step may take.

        They are for regions that grow, and for copies of shared pages.

        Args:
            grows_always: Whether regions at their capacity grow too.
            whole: Whether the step writes to every page of a region, not only to its last.
        """
        if self._slack > 0 and (not self._rows.may_share or (self._rows.appends_alone and not whole)):
            return 0
        lens = self.most_entries()
        growing = None if grows_always else self._lengths.known < self._budgets.capacities
        return page_lists.pages_for_step(self._rows, lens, growing, whole)

    def most_entries(self) -> Ints:
        """Return how many entries the plain pages of each region hold at most, (R,).

        No step is waited for. The bounds are about half a page too many at most. When lengths have come from the
        device, pages are freed that neither the entries nor the next one need.
        """
        if self._lengths.arrive():
            keep = self._lengths.most // self.pool.slots + 1
            spare = np.flatnonzero(self._rows.owned > keep)
            if len(spare):
                self._rows.cut(spare, keep[spare])
                self._slack = 0
        return self._lengths.most

    def _look_ahead(self) -> None:
        """Begin to copy lengths that only the device knows, before they decide about pages."""
        due = self.quantized is not None and self.quantized.steps_until_check <= LOOK_AHEAD
        codes_due = due and self._lengths.is_unsure(LOOK_AHEAD)
        if codes_due or 2 * self._lengths.drift >= self.pool.slots:
            self._lengths.look(again=codes_due)

    def pages_for(self, n_tokens: int, whole: bool) -> int:
        """Return the pages that `n_tokens` more entries of every head take, copies included.

        Args:
            n_tokens: New entries per head of every sequence.
            whole: Whether all entries are rewritten, not only the new ones.
        """
        return page_lists.pages_for(self._rows, self._lengths.host, n_tokens, whole)

    def pages_to_renew(self, max_pages: int) -> int:
        """Return the pages that it takes to rewrite all entries, at most `max_pages` of them.

        Pages that nobody else holds are freed first.
        """
        return page_lists.pages_to_renew(self._rows, max_pages)

    def stepped(self, grows_always: bool, active: npt.NDArray[np.bool_], n: int = 1) -> None:
        """Update the host's lengths after a decoding step, or on the CPU after `n` of them."""
        self._slack -= n
        if self.quantized is not None:
            self.quantized.stepped(not grows_always)
        if shares_memory(self.lens.device):
            return
        grew = np.repeat(active, self.n_kv_heads)
        if self._lengths.behind or (self.quantized is not None and not grows_always):
            if not grows_always:  # where a victim may lie among codes, whether it did is read when it must
                fills = self._lengths.most < self._budgets.capacities
                grew &= fills if self.quantized is None else fills | self.quantized.may_live
            self._lengths.grew(grew)
            self._look_ahead()
        else:
            grew &= grows_always | (self._lengths.host < self._budgets.capacities)
            self._lengths.host[:] += grew.astype(np.int32)

    def admitted(self) -> None:
        """Update the host's lengths after `ops.admit` made some smaller.

        Pages that no entry needs are freed: at once where the host sees the lengths, else when they arrive.
        """
        if shares_memory(self.lens.device):
            return self.trim()
        self._lengths.fell()
        self._look_ahead()

    def merged(self, due: npt.NDArray[np.bool_], previous_lens: Ints) -> None:
        """Update the lengths after a merge brought the `due` (S,) sequences to their capacities.

        Pages beyond them return to the pool; `previous_lens` (R,) are the entries before the merge.
        """
        removed = np.where(np.repeat(due, self.n_kv_heads), np.maximum(previous_lens - self._budgets.capacities, 0), 0)
        if not shares_memory(self.lens.device):
            self._lengths.host[:] -= removed
        keep = -(-self._lengths.host // self.pool.slots)
        spare = np.flatnonzero((self._rows.owned > keep) & (removed > 0))
        if len(spare):
            self._rows.cut(spare, keep[spare])
            self._slack = 0
        else:
            self._slack += int(removed.min())

    def set_lengths(self, sequence: int, lens: Ints) -> None:
        """Set the entries of each head of a sequence; pages beyond them return to the pool."""
        rows = self.rows(sequence)
        self._lengths.host[rows] = lens
        self._rows.cut(rows, -(-lens // self.pool.slots))
        self._slack = 0
        if self.quantized is not None:
            self.quantized.steps_until_check = 0
        self._publish(ids=False, budgets=False)

    def drop_first(self, rows: npt.NDArray[np.int64], pages: npt.NDArray[np.int64]) -> None:
        """Free the first pages (n,) of some regions, all of them full; later pages move up."""
        self._rows.drop(rows, self._rows.columns < pages[:, None])
        self._lengths.host[rows] -= (pages * self.pool.slots).astype(np.int32)
        self._slack = 0
        self._publish()

    def owns(self, rows: npt.NDArray[np.int64]) -> bool:
        """Return whether nobody else holds a page of some regions."""
        return not self._rows.may_share or bool((self.pool.refs(self._rows.held(rows)) == 1).all())

    def shrink(self, sequences: npt.NDArray[np.int64], lens: Ints) -> None:
        """Set fewer entries of the heads of some sequences, (n, n_kv_heads); free spare pages."""
        regions = (sequences[:, None] * self.n_kv_heads + np.arange(self.n_kv_heads)).ravel()
        self._lengths.host[regions] = lens.ravel()
        if not shares_memory(self.lens.device):
            self._publish(ids=False, budgets=False)
        self.trim()

    def trim(self) -> None:
        """Free the pages that no entry needs, after lengths fell."""
        slots = self.pool.slots
        spare = np.flatnonzero(self._lengths.host <= (self._rows.owned - 1) * slots)
        if len(spare):
            self._rows.cut(spare, -(-self._lengths.host[spare] // slots))
            self._slack = 0

    def renew(self, sequence: int, lens: Ints) -> None:
        """Drop all pages of a sequence and reserve fresh ones for `lens` entries, to be rewritten.

        Raises:
            PoolFullError: the pool is full; nothing was changed.
        """
        rows = self.rows(sequence)
        need = int((-(-lens // self.pool.slots)).sum())
        freed = int((self.pool.refs(self._rows.held(rows)) == 1).sum())
        if not self.pool.can_allocate(need - freed):
            raise PoolFullError(
                f"the page pool is full: {need} pages are needed for a sequence that frees {freed}, "
                f"{self.pool.n_live} of at most {self.pool.max_pages} are in use; what is cached stays readable. "
                "Raise memory_limit or lower the budget"
            )
        self._rows.cut(rows, 0)
        self._lengths.host[rows] = 0
        self.reserve(sequence, lens)

    # ------------------------------------------------------------------ sharing

    def select(self, sequences: list[int]) -> None:
        """Keep the given sequences of this table, in this order.

        One may be named many times: its pages are shared.
        """
        regions = np.concatenate([np.arange(self.n_regions)[self.rows(s)] for s in sequences])
        self._rows.select(regions)
        self._lengths.select(regions)
        self._budgets = self._budgets.select(regions)
        self.n_seq = len(sequences)
        if self.quantized is not None:
            self.quantized.select(sequences)
        self._slack = 0
        self._publish()

    def join(self, other: PageTable) -> None:
        """Take the sequences of another table of this pool, after these, and empty it."""
        assert other.n_kv_heads == self.n_kv_heads, "tables of one layer"
        self._rows.join(other._rows)
        self._lengths.join(other._lengths)
        self._budgets = self._budgets.join(other._budgets)
        self.n_seq += other.n_seq
        if self.quantized is not None and other.quantized is not None:
            for part, theirs in zip(self.packed_parts, other.packed_parts, strict=True):
                part.join(theirs)
        self._slack = 0
        other.clear()
        self._publish()

    def fork(self) -> PageTable:
        """Return a table of the same entries; pages are shared until one of the two writes."""
        other = PageTable(
            self.pool, self.n_seq, self.n_kv_heads, None if self.quantized is None else self.quantized.fork()
        )
        other._rows = self._rows.fork()
        other._lengths, other._budgets = self._lengths.copy(), self._budgets.copy()
        other._publish()
        return other

    def share(self) -> None:
        """Note that another holder shares some of these pages from now on."""
        self._rows.share()

    def copy_on_write(self, whole: bool) -> None:
        """Copy the shared pages of a region that will be written: all of them or only its last.

        Raises:
            PoolFullError: no room for the copies; nothing was changed.
        """
        if whole and self.quantized is not None:
            self.quantized.copy_on_write()
        if self._rows.may_share and (whole or not self._rows.appends_alone):
            written = None if whole else page_lists.written(self._rows, self._lengths.host, whole)
            if self._rows.copy_on_write(written):
                self._publish(lens=False, budgets=False)

    def shared_runs(self) -> SharedPrefixRuns | None:
        """Return the runs of full pages that sequences have in common at their beginning.

        None if no run is long enough.
        """
        if not self._rows.may_share or self.n_seq < 2:
            return None
        if not self._runs_current:
            by_sequence = (self.n_seq, self.n_kv_heads, -1)
            full = (self._lengths.host // self.pool.slots).reshape(by_sequence).min((1, 2))
            self._runs = SharedPrefixRuns.of(self._rows.ids.reshape(by_sequence), full, self.pool.arrays)
            self._runs_current = True
        return self._runs

    def emptied(self, pool: PagePool) -> PageTable:
        """Return a table of the same sequences, budgets and codes over another pool.

        It has no plain entries.
        """
        other = PageTable(pool, self.n_seq, self.n_kv_heads, self.quantized)
        other._budgets = self._budgets.copy()
        other._publish()
        return other

    def release_all(self) -> npt.NDArray[np.int64]:
        """Release every page and keep the rest, for `restore`; return the pages per region."""
        return self._rows.release_all()

    def restore(self, ids: PageIds, owned: npt.NDArray[np.int64]) -> None:
        """Hold pages after `release_all`: `ids` in the order of `held`, `owned` of each region."""
        self._rows.restore(ids, owned)
        self._slack = 0
        self._publish()

    def clear(self) -> None:
        """Release every page."""
        if self.quantized is not None:
            self.quantized.clear()
        self._rows.clear()
        self._lengths.host[:] = 0
        self._slack = 0
        self._publish()

    # ------------------------------------------------------------------ internal

    def _publish(self, ids: bool = True, lens: bool = True, budgets: bool = True) -> None:
        """Make numbers of the host visible to the kernels."""
        if self._is_visible_later():
            return
        device = self.pool.arrays.device
        if ids:
            self.pages = on_device(self._rows.ids, device)
            self._runs_current = False
        if lens:
            self.lens = self._lengths.publish(device)
        if budgets:
            self.capacities, self.recent, self.head_rules = self._budgets.publish(device)
        self.regions = PageRegions(self.pool.arrays, self.pages, self.lens)

    def _is_visible_later(self) -> bool:
        """Whether its changes become visible with those of other tables, see `publish_together`."""
        return not shares_memory(self.pool.arrays.device) and publishing.defer(self)
