"""Rolling: cache-relative positions by exact rotation (StreamingLLM's position rule, for keys stored after RoPE).

Attention sees distances only. Recent entries and the query already have the right distances to each other; only the
sinks lie too far back once entries between them and the recent ones have left. So before each pass the sinks, kept
unrotated beside the pages, are rotated to lie right before the oldest recent entry. To keep angles small in endless
text, all frames move back by a whole number of positions now and then, and the stored keys are rotated by that much.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from millpond.cache.table import RegionTable
from millpond.kernels import ops

#: Positions after which the frame moves back; angles in float32 stay accurate to about 1e-3 up to here.
EPOCH = 8192


class Rotation(Protocol):
    """The rotary embedding of a model."""

    def rotate(self, x: Tensor, positions: Tensor, inverse: bool = False) -> Tensor:
        """Keys or queries (B, H, n, D), rotated to (or back from) positions (B, n), in float32 or wider."""
        ...


class Rolling:
    """The sinks and the frame of one layer.

    Frame position of an entry = its position - base of its sequence; sinks excepted, which lie right before the
    oldest recent entry.

    Args:
        rotation: the model's. sinks: how many first positions stay.
    """

    def __init__(self, rotation: Rotation, sinks: int) -> None:
        self._rotation = rotation
        self._sinks = sinks
        self._base: np.ndarray = np.zeros(0, dtype=np.int64)
        self._keys: Tensor | None = None  # (S, H, sinks, key_dim), unrotated
        self._values: Tensor | None = None  # (S, H, sinks, value_dim)

    def copy(self, sequences: list[int] | None = None) -> Rolling:
        """A copy that changes on its own, of the given sequences in this order, or of all."""
        other = Rolling(self._rotation, self._sinks)
        if sequences == [] or self._keys is None or self._values is None:
            return other
        chosen = list(range(len(self._base))) if sequences is None else sequences
        other._base, other._keys, other._values = self._base[chosen], self._keys[chosen], self._values[chosen]
        return other

    def step(
        self, table: RegionTable, q: Tensor, k: Tensor, v: Tensor, positions: np.ndarray
    ) -> tuple[Tensor, Tensor]:
        """Before a decoding step: bring queries and keys (S, heads, D) into the frame and the sinks into place.

        positions (S,): of the new tokens, -1 where a sequence has none.
        """
        self._open(table, k, v)
        for sequence in np.flatnonzero(positions - self._base >= self._epoch(table)):
            self._rebase(table, int(sequence), int(positions[sequence]))
        self._capture(k[:, :, None], v[:, :, None], positions[:, None])
        self._place(table, positions, range(table.n_seq))
        if not self._base.any():
            return q, k
        framed = (self._to_frame(t[:, :, None], positions[:, None], self._base[:, None])[:, :, 0] for t in (q, k))
        return next(framed), next(framed)

    def prefill(
        self, table: RegionTable, sequence: int, q: Tensor, k: Tensor, v: Tensor, q_pos: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Before a pass of many tokens of one sequence: the same for queries and keys (heads, Q, D)."""
        self._open(table, k[None].expand(table.n_seq, -1, -1, -1), v[None].expand(table.n_seq, -1, -1, -1))
        positions = q_pos.cpu().numpy().astype(np.int64)
        if positions[0] - self._base[sequence] >= self._epoch(table):
            self._rebase(table, sequence, int(positions[0]))
        self._capture(k[None], v[None], positions[None], sequence)
        self._place(table, np.full(table.n_seq, positions[0]), [sequence])
        base = self._base[sequence]
        if base == 0:
            return q, k
        q, k = (self._to_frame(t[None], positions[None], np.array([[base]]))[0] for t in (q, k))
        return q, k

    # ------------------------------------------------------------------ internal

    def _open(self, table: RegionTable, k: Tensor, v: Tensor) -> None:
        if len(self._base) != table.n_seq:
            self._base = np.zeros(table.n_seq, dtype=np.int64)
        if self._keys is None:
            shape = (table.n_seq, table.n_kv_heads, self._sinks)
            wide = torch.promote_types(k.dtype, torch.float32)
            self._keys = torch.zeros(*shape, k.shape[-1], dtype=wide, device=k.device)
            self._values = torch.zeros(*shape, v.shape[-1], dtype=v.dtype, device=v.device)

    def _epoch(self, table: RegionTable) -> int:
        return max(EPOCH, 2 * int(table.lengths().max(initial=0)))

    def _to_frame(self, x: Tensor, positions: np.ndarray, base: np.ndarray) -> Tensor:
        """Rotate x (B, H, n, D) from `positions` (B, n) to positions - base."""
        here = torch.from_numpy(np.maximum(positions, 0)).to(x.device)
        there = torch.from_numpy(np.maximum(positions - base, 0)).to(x.device)
        return self._rotation.rotate(self._rotation.rotate(x, here, inverse=True), there).to(x.dtype)

    def _capture(self, k: Tensor, v: Tensor, positions: np.ndarray, sequence: int | None = None) -> None:
        """Remember the sinks among new keys (B, H, n, D), unrotated."""
        assert self._keys is not None
        assert self._values is not None
        for b, row in enumerate(positions):
            for column in np.flatnonzero((row >= 0) & (row < self._sinks)):
                place = int(row[column])
                key = k[b : b + 1, :, column : column + 1]
                at = torch.tensor([[place]], device=k.device)
                target = b if sequence is None else sequence
                unrotated = self._rotation.rotate(key, at, inverse=True)[0, :, 0]
                self._keys[target, :, place] = unrotated.to(self._keys.dtype)
                self._values[target, :, place] = v[b, :, column]

    def _place(self, table: RegionTable, positions: np.ndarray, sequences: range | list[int]) -> None:
        """Write the sinks of the given sequences where they belong before a query at `positions` (S,)."""
        assert self._keys is not None
        assert self._values is not None
        held = table.lengths()[:, 0]
        oldest_recent = positions - (held - self._sinks)
        moved = [s for s in sequences if held[s] > self._sinks and oldest_recent[s] > self._sinks]
        if not moved or not self._sinks:
            return
        n, h = len(moved), table.n_kv_heads
        first = oldest_recent[moved] - self._sinks - self._base[moved]
        frames = torch.from_numpy(first[:, None] + np.arange(self._sinks)).to(self._keys.device)
        keys = self._rotation.rotate(self._keys[moved], frames).flatten(0, 1)
        rows = torch.cat([torch.arange(table.rows(s).start, table.rows(s).stop) for s in moved])
        pages = table.pages[rows]
        index = torch.arange(self._sinks, dtype=torch.int32, device=keys.device).expand(n * h, -1).contiguous()
        zero = torch.zeros(n * h, dtype=torch.int32, device=keys.device)
        count = zero + self._sinks
        ops.write(table.pool.arrays, pages, zero, count, index, keys, self._values[moved].flatten(0, 1), index)

    def _rebase(self, table: RegionTable, sequence: int, position: int) -> None:
        """Move a sequence's frame so that its oldest recent entry lies right behind the sinks."""
        table.privatise(whole=True)
        rows = table.rows(sequence)
        width = int(table.lengths()[sequence].max(initial=0))
        oldest_recent = position - (width - self._sinks)
        base = max(0, oldest_recent - self._sinks)
        dense = ops.read(table.pool.arrays, table.pages[rows], table.lens[rows], width)
        at = dense.positions[:, None].long()  # (H, 1, n): each head is a batch row of its own
        old, new = ((at - b).clamp(min=0) for b in (int(self._base[sequence]), base))
        raw = self._rotation.rotate(dense.keys[:, None], old[:, 0], inverse=True)
        keys = self._rotation.rotate(raw, new[:, 0])[:, 0]
        index = torch.arange(width, dtype=torch.int32, device=keys.device).expand(len(keys), -1).contiguous()
        lens = table.lens[rows]
        ops.write(
            table.pool.arrays, table.pages[rows], torch.zeros_like(lens), lens, index,
            keys, dense.values, dense.positions, dense.scores,
        )  # fmt: skip
        self._base[sequence] = base
