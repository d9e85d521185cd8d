"""Pages of codes of a table's regions: what lies in their slots, and what the kernels see of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from millpond.cache.pages import page_lists
from millpond.cache.pages.channel_statistics import KeyChannels
from millpond.cache.pages.page_lists import PageLists, Rows
from millpond.cache.pages.pool import QuantizedPool
from millpond.cache.pages.ref_counted_pool import PageIds, RefCountedPool
from millpond.cache.pages.rope_tables import GrowingRope
from millpond.cache.pages.shared_prefix import SharedCodeRuns
from millpond.codec.basis import Basis
from millpond.codec.spec import Codec
from millpond.kernels import ops
from millpond.kernels.args import PaddedEntries
from millpond.kernels.eager.pages import gather
from millpond.kernels.packed.regions import PackedRegions
from millpond.kernels.transfers import on_device

Ints = npt.NDArray[np.int32]


class QuantizedRegions:
    """Pages of codes of `n_seq * n_kv_heads` regions, as they are read.

    The host keeps the tables, and the kernels read a copy of them on the pool's device (on the CPU the two are one
    memory). A decoding step on another device may write tombstones that the host reads when it next needs them.

    Args:
        codec: Number format.
        pool: Pool of its pages.
        n_seq: Number of sequences.
        n_kv_heads: KV heads of the layer.
        head_dim: Channels of a key before any are dropped.
        value_dim: Channels of a value before any are dropped.
        fixed: Scales and zeros (Hkv, D) of calibrated keys; None if they are computed.
        rope: Rotation of keys that are stored before RoPE; None if keys are stored after it.
        key_scales: Scales of `basis`; None if there are none.

    Attributes:
        codec: Number format.
        pool: Pool of its pages.
        head_dim: Channels of a key before any are dropped.
        value_dim: Channels of a value before any are dropped.
        basis: Basis of the numbers, here and in plain pages; None if they are as the model computes them.
        lens: Slots in use, tombstones included, (R,).
        steps_until_check: Decoding steps in which no page falls due to be quantized; 0 to check at the next step. Any
            change of the unquantized lengths other than a decoding step sets it to 0.
    """

    def __init__(
        self,
        codec: Codec,
        pool: QuantizedPool,
        n_seq: int,
        n_kv_heads: int,
        head_dim: int,
        value_dim: int,
        *,
        fixed: tuple[Tensor, Tensor] | None = None,
        rope: GrowingRope | None = None,
        key_scales: Tensor | None = None,
    ) -> None:
        self.codec, self.pool, self.head_dim = codec, pool, head_dim
        device, layout, self.value_dim = pool.arrays.device, pool.arrays.layout, value_dim
        self._fixed = None if fixed is None else (fixed[0].to(device), fixed[1].to(device))
        self._rope, self._device = rope, device
        turned = codec.rotated or key_scales is not None
        self.basis = Basis(codec.rotated, key_scales) if turned else None
        self.n_seq, self.n_kv_heads = n_seq, n_kv_heads
        n = n_seq * n_kv_heads
        self.lens: Ints = np.zeros(n, dtype=np.int32)
        self._dead: Ints = np.zeros(n, dtype=np.int32)
        self._behind = False  # the device has buried more than `_dead` counts
        self._pages = PageLists(pool, n)
        self._keys = KeyChannels(codec, n_seq, n_kv_heads, layout.key_dim, layout.value_dim, device)
        self.steps_until_check = 0
        self._runs: SharedCodeRuns | None = None
        self._runs_current = True
        self._view: PackedRegions | None = None  # what the kernels see of all regions, until something changes
        pool.holders.add(self)

    # ------------------------------------------------------------------ views

    @property
    def slots(self) -> int:
        """Entries of a page."""
        return self.pool.slots

    @property
    def is_behind(self) -> bool:
        """Whether the device has buried more than the host knows."""
        return self._behind and self._view is not None

    @property
    def n_evicted(self) -> Ints:
        """Tombstones, (R,), which the decode kernel counts too."""
        if self.is_behind and self._view is not None:
            self._dead[:] = self._view.dead.cpu().numpy()
        self._behind = False
        return self._dead

    @property
    def live(self) -> Ints:
        """Entries that are held, (n_seq, n_kv_heads)."""
        return (self.lens - self.n_evicted).reshape(self.n_seq, self.n_kv_heads)

    @property
    def may_live(self) -> npt.NDArray[np.bool_]:
        """Whether a region may hold an entry, (R,), for which nothing waits."""
        holds: npt.NDArray[np.bool_] = self.lens > self._dead
        return holds

    @property
    def nbytes(self) -> int:
        """Bytes of the tables themselves."""
        return self._pages.ids.nbytes + self.lens.nbytes + self._dead.nbytes + self._keys.nbytes

    def kv_bytes(self) -> npt.NDArray[np.int64]:
        """Return the bytes of keys and values in the pages of each sequence, (n_seq,)."""
        pages: npt.NDArray[np.int64] = self._pages.owned.reshape(self.n_seq, self.n_kv_heads).sum(1)
        return pages * self.pool.kv_bytes_per_page

    def rows(self, sequence: int) -> slice:
        """Return the regions of one sequence."""
        return slice(sequence * self.n_kv_heads, (sequence + 1) * self.n_kv_heads)

    def regions(self, rows: Rows | None = None) -> PackedRegions:
        """Return some regions as the kernels read them; all of them for None."""
        rope = None if self._rope is None else self._rope.tables
        if self._view is None or self._view.rope is not rope:
            ids, lens, dead = (self._there(x) for x in (self._pages.ids, self.lens, self.n_evicted))
            scales, zeros = self._fixed or (None, None)
            channels, balance, values = self._keys.tables.values()
            sides = channels, balance, scales, zeros, rope, values, self.value_dim
            self._view = PackedRegions(self.pool.arrays, ids, lens, dead, *sides)
        return self._view if rows is None else self._view.part(rows)

    @property
    def page_lists(self) -> PageLists:
        """The pages of the regions, see `PageTable.page_lists`."""
        return self._pages

    @property
    def region_lengths(self) -> Ints:
        """Slots in use, (R,), tombstones included."""
        return self.lens

    def exchange(self, lists: PageLists) -> None:
        """Hold other pages with the same content, see `PageTable.exchange`."""
        self._pages = lists
        self._changed()

    def held(self) -> PageIds:
        """Return the page ids of all regions, a shared page once per holder."""
        return self._pages.held()

    def held_in(self, pool: RefCountedPool[Any]) -> list[PageIds]:
        """See `PageHolder`."""
        return [self._pages.held()] if self._pages.pool is pool else []

    def follow(self, pool: RefCountedPool[Any], new_ids: PageIds) -> None:
        """See `PageHolder`."""
        if self._pages.pool is pool:
            self._pages.follow(new_ids)
            self._changed()

    def held_by(self, row: int) -> PageIds:
        """Return the page ids of one region, in the order of its slots."""
        return self._pages.held(slice(row, row + 1))

    def page_columns(self, columns: slice) -> PageIds:
        """Return the ids of some pages of each region, (R * n,), region by region."""
        return self._pages.ids[:, columns].ravel().copy()

    def n_copied(self, whole: bool) -> int:
        """Return the pages that a step copies first, because others hold them too.

        Args:
            whole: Whether it writes scores or tombstones to all pages; False: it adds entries at most.
        """
        if not self._pages.may_share:
            return 0
        return self._pages.n_shared(page_lists.written(self._pages, self.lens, whole))

    def shared_runs(self) -> SharedCodeRuns | None:
        """Return the runs of full pages that sequences have in common at their beginning.

        None if no run is long enough, or entries have left.
        """
        if not self._pages.may_share or self.n_seq < 2 or self.codec.balanced or self.codec.prune:
            return None
        if not self._runs_current:
            by_sequence = (self.n_seq, self.n_kv_heads, -1)
            full = (self.lens // self.slots * (self.n_evicted == 0)).reshape(by_sequence).min((1, 2))
            ids = self._pages.ids.reshape(by_sequence)
            self._runs = SharedCodeRuns.of(ids, full, self.regions(), self.head_dim)
            self._runs_current = True
        return self._runs

    def width(self, sequence: int) -> int:
        """Return the slots of the longest region of a sequence."""
        return int(self.lens[self.rows(sequence)].max(initial=0))

    def read(self, sequence: int) -> PaddedEntries:
        """Return the entries of a sequence as float32 numbers, slot by slot.

        Tombstones and padding have position -1.
        """
        return ops.read_packed(self.regions(self.rows(sequence)), self.width(sequence), self.head_dim)

    def slot_ids(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """Return flat slot ids (n, width) of some regions, and which of them are in use.

        Ids of unused slots are 0.
        """
        width = int(self.lens[rows].max(initial=0))
        slot = torch.arange(max(width, self.slots), device=self._device)
        used = slot[:width] < self._there(self.lens[rows])[:, None]
        pages = self._there(self._pages.ids[rows, : -(-width // self.slots)]).long()
        ids = (pages[:, :, None] * self.slots + slot[: self.slots]).flatten(1)[:, :width]
        return torch.where(used, ids, 0), used

    def positions(self, rows: Rows) -> Tensor:
        """Return the positions in the slots of some regions, (n, width) int32; -1 for no entry."""
        ids, used = self.slot_ids(rows)
        return torch.where(used, gather(self.pool.arrays.positions, ids), -1) if ids.numel() else ids.int()

    def scores(self, rows: Rows) -> Tensor:
        """Return the score accumulators of some regions, (n, width) float32."""
        ids, _ = self.slot_ids(rows)
        return gather(self.pool.arrays.scores, ids) if ids.numel() else ids.float()

    # ------------------------------------------------------------------ copies for the kernels

    def _there(self, numbers: npt.NDArray[Any]) -> Tensor:
        """Return numbers as the kernels read them, on the pool's device."""
        return on_device(numbers, self._device)

    def _changed(self) -> None:
        """Let the kernels' view be rebuilt on its next use, as the host's tables changed."""
        _ = self.n_evicted  # what the kernels have done to theirs is not lost
        self._view, self._runs_current = None, False
