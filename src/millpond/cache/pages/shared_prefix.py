"""Runs of pages that several sequences of a batch begin with, attended to once for all of them.

The two-phase partition of ChunkAttention (Ye et al., 2024, arXiv:2402.15220, section 3.2): queries of all sharers meet
a shared run together, then each sequence decodes over its own pages, and the parts are merged by their log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from millpond.kernels import ops
from millpond.kernels.args import AttentionShape, DecodeArgs, PageRegions, SharedRegions, StepRegions
from millpond.kernels.decode_rules import KEEP_ALL
from millpond.kernels.eager.attention import attend_entries
from millpond.kernels.eager.softmax import lse_merge
from millpond.kernels.packed.regions import PackedRegions
from millpond.kernels.pages import PageArrays
from millpond.kernels.transfers import on_device

#: Entries of a head that a run must spare the batch reading, to be worth a call of its own.
MIN_SHARED_ENTRIES = 512
#: The same of a run of codes: shorter ones lie in the processor's cache, from which reading them again takes less time
#: than merging parts.
MIN_SHARED_CODES = 16_384
#: Devices whose kernels take as many query heads of a KV head as there are; elsewhere codes are decoded to numbers.
FOLDED_DEVICES = ("cpu",)
#: Entries of a page into which a step over a run stores the entry that it takes for a new one.
SCRATCH_SLOTS = 32


class SharedRun(NamedTuple):
    """Full pages begin .. end - 1 of each head, shared by all `members` (ascending sequences)."""

    members: tuple[int, ...]
    begin: int
    end: int


class SharedRuns:
    """Runs of one table, or of its codes, in the current state.

    Args:
        runs: Runs; those of a sequence follow each other, and its own pages follow the last one.
        ids: Page ids, (S, Hkv, n).
        slots: Entries of a page.
        device: Device of the pages.

    Attributes:
        runs: Runs, as given.
        own_pages: Pages after the runs, (R, n) int32, on the device of the pages.
        shared_lens: Entries in runs, (R,) int32, on the device of the pages.
    """

    def __init__(self, runs: list[SharedRun], ids: npt.NDArray[np.int32], slots: int, device: torch.device) -> None:
        self.runs = runs
        n_kv_heads = ids.shape[1]
        shared_pages = np.zeros((len(ids), 1, 1), dtype=np.int32)
        for run in runs:
            shared_pages[list(run.members)] = run.end
        last = ids.shape[2] - 1
        own_pages = np.take_along_axis(ids, np.minimum(np.arange(last + 1) + shared_pages, last), 2)
        self.own_pages = torch.from_numpy(own_pages).flatten(0, 1).to(device)
        self.shared_lens = on_device((shared_pages[:, 0] * slots).repeat(n_kv_heads, 1).ravel(), device)
        self._calls = [  # of each run: whose queries, which pages (Hkv, n), how many entries (Hkv,)
            (
                torch.tensor(members, device=device),
                on_device(ids[members[0], :, begin:end].copy(), device),
                torch.full((n_kv_heads,), (end - begin) * slots, dtype=torch.int32, device=device),
            )
            for members, begin, end in runs
        ]


class SharedPrefixRuns(SharedRuns):
    """Runs of plain pages of one table.

    Args:
        runs: See `SharedRuns`.
        ids: See `SharedRuns`.
        arrays: Memory of the pages.

    Attributes:
        shared: Entries of the runs, for `ops.decode_shared`.
    """

    def __init__(self, runs: list[SharedRun], ids: npt.NDArray[np.int32], arrays: PageArrays) -> None:
        super().__init__(runs, ids, arrays.slots, arrays.device)
        self.shared = tuple(
            SharedRegions(members, PageRegions(arrays, pages, lens)) for members, pages, lens in self._calls
        )

    @classmethod
    def of(cls, ids: npt.NDArray[np.int32], full: npt.NDArray[np.int32], arrays: PageArrays) -> SharedPrefixRuns | None:
        """Return the runs that save enough reading; None if there are none.

        Args:
            ids: Page ids, (S, Hkv, n).
            full: Leading pages that are full in every head, (S,).
            arrays: Memory of the pages.
        """
        runs = runs_of(ids, full, arrays.slots, MIN_SHARED_ENTRIES)
        return cls(runs, ids, arrays) if runs else None


class SharedCodeRuns(SharedRuns):
    """Runs of pages of codes of one table: each is decoded once for all its members.

    Args:
        runs: See `SharedRuns`.
        ids: See `SharedRuns`.
        regions: The codes of all sequences, in which every page of a run is full; no key channels are left out.
        head_dim: Channels of a key.
    """

    def __init__(
        self, runs: list[SharedRun], ids: npt.NDArray[np.int32], regions: PackedRegions, head_dim: int
    ) -> None:
        super().__init__(runs, ids, regions.pages.layout.slots, regions.table.device)
        self._regions, self._head_dim = regions, head_dim
        self._queries: list[_RunQueries | None] = [None] * len(runs)
        self.own_regions = replace(regions, table=self.own_pages, lens=regions.lens - self.shared_lens)

    @classmethod
    def of(
        cls, ids: npt.NDArray[np.int32], full: npt.NDArray[np.int32], regions: PackedRegions, head_dim: int
    ) -> SharedCodeRuns | None:
        """Return the runs that save enough reading, see `SharedPrefixRuns.of`."""
        runs = runs_of(ids, full, regions.pages.layout.slots, MIN_SHARED_CODES)
        return cls(runs, ids, regions, head_dim) if runs else None

    def attend(self, q: Tensor, out: Tensor, lse: Tensor, shape: AttentionShape) -> Tensor:
        """Attend to the runs and merge the result with the attention to other pages.

        Args:
            q: Queries, (S, Hq, key_dim).
            out: Attention to other pages, (S, Hq, value_dim), of q's dtype.
            lse: Its log-sum-exp, (S, Hq) float32; becomes that of all entries.
            shape: Scale and soft cap of the layer.

        Returns:
            (S, Hq, value_dim), of q's dtype: runs are merged in float32.
        """
        merged = out.float()
        for number, (members, pages, lens) in enumerate(self._calls):
            run = replace(self._regions, table=pages, lens=lens, dead=torch.zeros_like(lens))
            if q.device.type not in FOLDED_DEVICES:
                entries = ops.read_packed(run, int(pages.shape[1]) * run.pages.layout.slots, self._head_dim)
                attend_entries(q, entries, shape.scale, shape.softcap, members, (merged, lse))
                continue
            queries = self._queries[number] = self._queries[number] or _RunQueries(run, self._head_dim)
            shared, shared_lse = queries.attend(q[members], shape)
            merged[members], lse[members] = lse_merge(merged[members], lse[members], shared, shared_lse)
        return merged.to(out.dtype)


class _RunQueries:
    """Attention of many sequences to a run of codes, as heads of one sequence.

    The kernel of `ops.decode` reads codes for all query heads of a KV head at once. It attends to a new entry as well:
    here the last entry of the run, as a number.

    Args:
        run: Codes of the run, Hkv regions of the same length.
        head_dim: Channels of a key.
    """

    def __init__(self, run: PackedRegions, head_dim: int) -> None:
        n_heads, device, slots = len(run.table), run.table.device, run.pages.layout.slots
        last = replace(run, table=run.table[:, -1:].contiguous(), lens=torch.full_like(run.lens, slots))
        entries = ops.read_packed(last, slots, head_dim)
        self._k, self._v = (part[None, :, -1].contiguous() for part in (entries.keys, entries.values))
        self._position = entries.positions[:1, -1].contiguous()
        self._codes = replace(run, lens=run.lens - 1)
        n_pages = 1 << (n_heads - 1).bit_length()
        page = PageArrays(n_pages, SCRATCH_SLOTS, head_dim, self._v.shape[-1], torch.float32, device)
        page.add_arena()
        table = torch.arange(n_heads, dtype=torch.int32, device=device)[:, None]
        self._scratch = PageRegions(page, table, torch.zeros_like(run.lens))
        self._limits = torch.full_like(run.lens, 2**30), torch.zeros_like(run.lens)

    def attend(self, q: Tensor, shape: AttentionShape) -> tuple[Tensor, Tensor]:
        """Return the attention and log-sum-exp of queries (n, Hq, key_dim), in float32.

        They are (n, Hq, value_dim) and (n, Hq).
        """
        n, n_heads, dim = q.shape
        n_kv_heads = len(self._scratch.table)
        folded = q.float().view(n, n_kv_heads, -1, dim).transpose(0, 1).reshape(1, -1, dim)
        self._scratch.lens.zero_()
        plain = AttentionShape(shape.scale, shape.softcap)
        regions = StepRegions(self._scratch, *self._limits, self._position, KEEP_ALL, plain, self._codes)
        out, lse, _ = ops.decode(DecodeArgs(folded, self._k, self._v, regions))
        by_member = out.view(n_kv_heads, n, -1, out.shape[-1]).transpose(0, 1).reshape(n, n_heads, -1)
        return by_member, lse.view(n_kv_heads, n, -1).transpose(0, 1).reshape(n, n_heads)


def runs_of(ids: npt.NDArray[np.int32], full: npt.NDArray[np.int32], slots: int, min_entries: int) -> list[SharedRun]:
    """Return the runs that spare the batch reading `min_entries` entries of a head.

    Args:
        ids: Page ids, (S, Hkv, n).
        full: Leading pages that are full in every head, (S,).
        slots: Entries of a page.
        min_entries: Entries that a run must spare.
    """
    if len(set(ids[full > 0, 0, 0].tolist())) == int((full > 0).sum()):
        return []
    return list(_runs(ids, full, tuple(range(len(ids))), 0, slots, min_entries))


def _runs(
    ids: npt.NDArray[np.int32],
    full: npt.NDArray[np.int32],
    members: tuple[int, ...],
    begin: int,
    slots: int,
    min_entries: int,
) -> Iterator[SharedRun]:
    """Yield the runs of `members`, which share everything before page `begin`."""
    groups: dict[bytes, list[int]] = {}
    for s in members:
        if full[s] > begin:
            groups.setdefault(ids[s, :, begin].tobytes(), []).append(s)
    for group in groups.values():
        if len(group) < 2:
            continue
        max_pages = int(full[group].min())
        is_shared = (ids[group, :, begin:max_pages] == ids[group[:1], :, begin:max_pages]).all((0, 1))
        end = max_pages if is_shared.all() else begin + int(is_shared.argmin())
        if (len(group) - 1) * (end - begin) * slots >= min_entries:
            yield SharedRun(tuple(group), begin, end)
            yield from _runs(ids, full, tuple(group), end, slots, min_entries)
