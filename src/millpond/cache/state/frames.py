"""Positions of keys inside a frame: keys and queries that are turned by the same amount attend as before."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from millpond.cache.pages.page_table import PageTable
from millpond.cache.rope_protocol import RotaryEmbedding
from millpond.kernels import ops
from millpond.kernels.args import EntryRows, PaddedEntries


class CacheRelativePositions(Protocol):
    """How the queries and keys of one layer come to positions inside the cache."""

    @property
    def frames(self) -> np.ndarray:
        """(S,) by how much the keys of each sequence were turned back; where this changes, so do stored keys."""
        ...

    def copy(self, sequences: list[int] | None = None) -> CacheRelativePositions:
        """A copy that changes on its own, of the given sequences in this order, or of all."""
        ...

    def join(self, other: Any, n_seq: int) -> None:
        """Take over the sequences of `other`, of the same kind, after the `n_seq` of this batch."""
        ...

    def tensors(self, sequence: int) -> dict[str, Tensor]:
        """All that is remembered of one sequence, for `adopt`."""
        ...

    def adopt(self, stored: dict[str, Tensor]) -> None:
        """Hold one sequence, of which `tensors` gave this elsewhere.

        Raises:
            KeyError: a tensor is missing.
        """
        ...

    def step(self, table: PageTable, q: Tensor, k: Tensor, positions: np.ndarray) -> tuple[Tensor, Tensor]:
        """Before a decoding step: queries and keys (S, heads, D) of tokens at `positions` (S,), -1 for none."""
        ...

    def prefill(self, table: PageTable, sequence: int, q: Tensor, k: Tensor, q_pos: Tensor) -> tuple[Tensor, Tensor]:
        """Before a pass of many tokens of one sequence: the same for queries and keys (heads, Q, D)."""
        ...

    def places(self, sequence: int, at: Tensor) -> Tensor:
        """(H, n) frame positions of entries at positions `at` (H, n); 0 where there is no entry."""
        ...

    def restart(self, table: PageTable, sequence: int) -> None:
        """The stored entries of a sequence were given the frame positions that are their positions."""
        ...


def to_frame(rotation: RotaryEmbedding, x: Tensor, positions: np.ndarray, base: np.ndarray) -> Tensor:
    """Turn x (B, H, n, D) from `positions` (B, n) to positions - base, with base (B, n) or (B, 1)."""
    here = torch.from_numpy(np.maximum(positions, 0)).to(x.device)
    there = torch.from_numpy(np.maximum(positions - base, 0)).to(x.device)
    return rotation.rotate(rotation.rotate(x, here, inverse=True), there).to(x.dtype)


def frame_step(
    rotation: RotaryEmbedding, q: Tensor, k: Tensor, positions: np.ndarray, base: np.ndarray
) -> tuple[Tensor, Tensor]:
    """Queries and keys (S, heads, D) of a decoding step, from `positions` (S,) to positions - base (S,)."""
    if not base.any():
        return q, k
    heads = torch.cat([q, k], 1)[:, :, None]
    framed = to_frame(rotation, heads, positions[:, None], base[:, None])[:, :, 0]
    return framed[:, : q.shape[1]], framed[:, q.shape[1] :]


def frame_prompt(
    rotation: RotaryEmbedding, q: Tensor, k: Tensor, positions: np.ndarray, base: int
) -> tuple[Tensor, Tensor]:
    """Queries and keys (heads, Q, D) of one sequence, from `positions` (Q,) to positions - base."""
    if base == 0:
        return q, k
    shift = np.array([[base]])
    return (
        to_frame(rotation, q[None], positions[None], shift)[0],
        to_frame(rotation, k[None], positions[None], shift)[0],
    )


def stored(table: PageTable, sequence: int) -> PaddedEntries:
    """The entries of a sequence, one row per head, before they are written again."""
    table.copy_on_write(whole=True)
    width = int(table.lengths()[sequence].max(initial=0))
    return ops.read(table.regions_of(table.rows(sequence)), width)


def turn(
    rotation: RotaryEmbedding | None, table: PageTable, sequence: int, dense: PaddedEntries, old: Tensor, new: Tensor
) -> None:
    """Write the stored entries of a sequence again, with keys turned from `old` (H, n) to `new` (H, n).

    rotation: None for keys that have no rotary position.
    """
    keys = dense.keys
    if rotation is not None:
        raw = rotation.rotate(keys[:, None], old, inverse=True)  # each head is a batch row of its own
        keys = rotation.rotate(raw, new)[:, 0]
    width = keys.shape[1]
    rows = table.rows(sequence)
    index = torch.arange(width, dtype=torch.int32, device=keys.device).expand(len(keys), -1).contiguous()
    lens = table.lens[rows]
    turned = EntryRows(torch.zeros_like(lens), lens, index, keys, dense.values, dense.positions, dense.scores)
    ops.write(table.regions_of(rows), turned)
