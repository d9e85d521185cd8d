"""Runs of pages that several sequences of a batch begin with, attended to once for all of them.

The two-phase partition of ChunkAttention (Ye et al., 2024, section 3.2): queries of all sharers meet a shared run
together, then each sequence decodes over what is its own, and the parts are put together by their log-sum-exp.
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
    """Full pages begin .. end - 1 of each head, the same for all `members` (ascending sequences)."""

    members: tuple[int, ...]
    begin: int
    end: int


class SharedPrefixRuns:
    """The runs of one table as it is now.

    Attributes:
        runs: those of a sequence follow each other, and its own pages follow the last one.
        own: (R, n) int32, the pages after the runs. taken: (R,) int32, entries in runs. On the device of the pages.
    """

    def __init__(self, runs: list[SharedRun], ids: npt.NDArray[np.int32], arrays: PageArrays) -> None:
        self.runs = runs
        self._arrays = arrays
        n_kv_heads, device = ids.shape[1], arrays.device
        taken = np.zeros((len(ids), 1, 1), dtype=np.int32)
        for run in runs:
            taken[list(run.members)] = run.end
        last = ids.shape[2] - 1
        own = np.take_along_axis(ids, np.minimum(np.arange(last + 1) + taken, last), 2)
        self.own = torch.from_numpy(own).flatten(0, 1).to(device)
        self.taken = torch.from_numpy((taken[:, 0] * arrays.slots).repeat(n_kv_heads, 1).ravel()).to(device)
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
        """The runs that are worth it, if there are any.

        Args:
            ids: (S, Hkv, n) page ids. full: (S,) leading pages that are full in every head. arrays: their memory.
        """
        runs = list(_runs(ids, full, tuple(range(len(ids))), 0, arrays.slots))
        return cls(runs, ids, arrays) if runs else None

    def attend(self, q: Tensor, out: Tensor, lse: Tensor, shape: AttentionShape) -> Tensor:
        """What queries q (S, Hq, key_dim) find in the runs, put together with what they found elsewhere.

        Args:
            out: (S, Hq, value_dim) of q's dtype, contiguous; used up. lse: (S, Hq) float32; becomes that of all.

        Returns:
            (S, Hq, value_dim), of q's dtype: several runs are put together in float32.
        """
        together = out if len(self._calls) == 1 else out.float()
        for members, pages, lens in self._calls:
            shared = PageRegions(self._arrays, pages, lens)
            ops.attend(AttendArgs(q, shared, shape.scale, shape.softcap, members, (together, lse)))
        return together.to(out.dtype)


def _runs(
    ids: npt.NDArray[np.int32], full: npt.NDArray[np.int32], members: tuple[int, ...], begin: int, slots: int
) -> Iterator[SharedRun]:
    """The runs of `members`, who share everything before page `begin`."""
    groups: dict[bytes, list[int]] = {}
    for s in members:
        if full[s] > begin:
            groups.setdefault(ids[s, :, begin].tobytes(), []).append(s)
    for group in groups.values():
        if len(group) < 2:
            continue
        most = int(full[group].min())
        alike = (ids[group, :, begin:most] == ids[group[:1], :, begin:most]).all((0, 1))
        end = most if alike.all() else begin + int(alike.argmin())
        if (len(group) - 1) * (end - begin) * slots >= MIN_SHARED_ENTRIES:
            yield SharedRun(tuple(group), begin, end)
            yield from _runs(ids, full, tuple(group), end, slots)
