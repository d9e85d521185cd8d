"""Runs of pages that several sequences of a batch begin with, attended to once for all of them.

The two-phase partition of ChunkAttention (Ye et al., 2024, section 3.2): queries of all sharers meet a shared run
together, then each sequence decodes over its own pages, and the parts are merged by their log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from millpond.kernels import ops
from millpond.kernels.args import AttendArgs, AttentionShape, PageRegions
from millpond.kernels.pages import PageArrays

#: Entries of a head that a run must spare the batch reading, to be worth a call of its own.
MIN_SHARED_ENTRIES = 512


class SharedRun(NamedTuple):
    """Full pages begin .. end - 1 of each head, shared by all `members` (ascending sequences)."""

    members: tuple[int, ...]
    begin: int
    end: int


class SharedPrefixRuns:
    """Runs of one table in its current state.

    Args:
        runs: Runs; those of a sequence follow each other, and its own pages follow the last one.
        ids: Page ids, (S, Hkv, n).
        arrays: Memory of the pages.

    Attributes:
        runs: Runs, as given.
        own_pages: Pages after the runs, (R, n) int32, on the device of the pages.
        shared_lens: Entries in runs, (R,) int32, on the device of the pages.
    """

    def __init__(self, runs: list[SharedRun], ids: npt.NDArray[np.int32], arrays: PageArrays) -> None:
        self.runs = runs
        self._arrays = arrays
        n_kv_heads, device = ids.shape[1], arrays.device
        shared_pages = np.zeros((len(ids), 1, 1), dtype=np.int32)
        for run in runs:
            shared_pages[list(run.members)] = run.end
        last = ids.shape[2] - 1
        own_pages = np.take_along_axis(ids, np.minimum(np.arange(last + 1) + shared_pages, last), 2)
        self.own_pages = torch.from_numpy(own_pages).flatten(0, 1).to(device)
        self.shared_lens = torch.from_numpy((shared_pages[:, 0] * arrays.slots).repeat(n_kv_heads, 1).ravel()).to(
            device
        )
        self._calls = [  # of each run: whose queries, which pages (Hkv, n), how many entries (Hkv,)
            (
                torch.tensor(members, device=device),
                torch.from_numpy(ids[members[0], :, begin:end].copy()).to(device),
                torch.full((n_kv_heads,), (end - begin) * arrays.slots, dtype=torch.int32, device=device),
            )
            for members, begin, end in runs
        ]

    @classmethod
    def of(cls, ids: npt.NDArray[np.int32], full: npt.NDArray[np.int32], arrays: PageArrays) -> SharedPrefixRuns | None:
        """Return the runs that save enough reading; None if there are none.

        Args:
            ids: Page ids, (S, Hkv, n).
            full: Leading pages that are full in every head, (S,).
            arrays: Memory of the pages.
        """
        runs = list(_runs(ids, full, tuple(range(len(ids))), 0, arrays.slots))
        return cls(runs, ids, arrays) if runs else None

    def attend(self, q: Tensor, out: Tensor, lse: Tensor, shape: AttentionShape) -> Tensor:
        """Attend to the runs and merge the result with the attention to other pages.

        Args:
            q: Queries, (S, Hq, key_dim).
            out: Attention to other pages, (S, Hq, value_dim), of q's dtype, contiguous; overwritten.
            lse: Its log-sum-exp, (S, Hq) float32; becomes that of all entries.
            shape: Scale, soft cap and window of the layer.

        Returns:
            (S, Hq, value_dim), of q's dtype: several runs are merged in float32.
        """
        merged = out if len(self._calls) == 1 else out.float()
        for members, pages, lens in self._calls:
            shared = PageRegions(self._arrays, pages, lens)
            ops.attend(AttendArgs(q, shared, shape.scale, shape.softcap, members, (merged, lse)))
        return merged.to(out.dtype)


def _runs(
    ids: npt.NDArray[np.int32], full: npt.NDArray[np.int32], members: tuple[int, ...], begin: int, slots: int
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
        if (len(group) - 1) * (end - begin) * slots >= MIN_SHARED_ENTRIES:
            yield SharedRun(tuple(group), begin, end)
            yield from _runs(ids, full, tuple(group), end, slots)
