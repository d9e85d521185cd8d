"""Cache-relative positions by exact rotation of stored keys (StreamingLLM), inside frames of positions."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from millpond.cache.entries.compaction import SlotWriter, slots_of
from millpond.cache.pages.page_table import PageTable
from millpond.cache.types import RotaryEmbedding
from millpond.kernels import ops
from millpond.kernels.args import EntryRows, PaddedEntries


class CacheRelativePositions(Protocol):
    """How the queries and keys of one layer come to positions inside the cache."""

    @property
    def frames(self) -> np.ndarray:
        """By how much the keys of each sequence were turned back, (S,); where this changes, so do stored keys."""
        ...

    def copy(self, sequences: list[int] | None = None) -> CacheRelativePositions:
        """Return a copy that changes on its own, of the given sequences in this order, or of all."""
        ...

    def join(self, other: Any, n_seq: int) -> None:
        """Take over the sequences of `other`, of the same kind, after the `n_seq` of this batch."""
        ...

    def tensors(self, sequence: int) -> dict[str, Tensor]:
        """Return all that is remembered of one sequence, for `adopt`."""
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
        """Return frame positions of entries at positions `at` , (H, n)(H, n); 0 where there is no entry."""
        ...

    def restart(self, table: PageTable, sequence: int) -> None:
        """Return the stored entries of a sequence were given the frame positions that are their positions."""
        ...


def to_frame(rotary: RotaryEmbedding, x: Tensor, positions: np.ndarray, base: np.ndarray) -> Tensor:
    """Turn x (B, H, n, D) from `positions` (B, n) to positions - base, with base (B, n) or (B, 1)."""
    here = torch.from_numpy(np.maximum(positions, 0)).to(x.device)
    there = torch.from_numpy(np.maximum(positions - base, 0)).to(x.device)
    return rotary.rotate(rotary.rotate(x, here, inverse=True), there).to(x.dtype)


def frame_step(
    rotary: RotaryEmbedding, q: Tensor, k: Tensor, positions: np.ndarray, base: np.ndarray
) -> tuple[Tensor, Tensor]:
    """Queries and keys (S, heads, D) of a decoding step, from `positions` (S,) to positions - base (S,)."""
    if not base.any():
        return q, k
    heads = torch.cat([q, k], 1)[:, :, None]
    framed = to_frame(rotary, heads, positions[:, None], base[:, None])[:, :, 0]
    return framed[:, : q.shape[1]], framed[:, q.shape[1] :]


def frame_prompt(
    rotary: RotaryEmbedding, q: Tensor, k: Tensor, positions: np.ndarray, base: int
) -> tuple[Tensor, Tensor]:
    """Queries and keys (heads, Q, D) of one sequence, from `positions` (Q,) to positions - base."""
    if base == 0:
        return q, k
    shift = np.array([[base]])
    return (to_frame(rotary, q[None], positions[None], shift)[0], to_frame(rotary, k[None], positions[None], shift)[0])


def stored(table: PageTable, sequence: int) -> PaddedEntries:
    """Return the entries of a sequence, one row per head, before they are written again."""
    table.copy_on_write(whole=True)
    width = int(table.lengths()[sequence].max(initial=0))
    return ops.read(table.regions_of(table.rows(sequence)), width)


def turn(
    rotary: RotaryEmbedding | None, table: PageTable, sequence: int, dense: PaddedEntries, old: Tensor, new: Tensor
) -> None:
    """Write the stored entries of a sequence again, with keys turned from `old` (H, n) to `new` (H, n).

    rotary: None for keys that have no rotary position.
    """
    keys = dense.keys
    if rotary is not None:
        raw = rotary.rotate(keys[:, None], old, inverse=True)  # each head is a batch row of its own
        keys = rotary.rotate(raw, new)[:, 0]
    width = keys.shape[1]
    rows = table.rows(sequence)
    index = torch.arange(width, dtype=torch.int32, device=keys.device).expand(len(keys), -1).contiguous()
    lens = table.lens[rows]
    turned = EntryRows(torch.zeros_like(lens), lens, index, keys, dense.values, dense.positions, dense.scores)
    ops.write(table.regions_of(rows), turned)


#: Positions after which the frame moves back; angles in float32 stay accurate to about 1e-3 up to here.
EPOCH = 8192
#: Keys of a head's sinks that are made at once, for as many places as they are enough for.
READY = 128


def places_ahead(sinks: int) -> int:
    """Places in a row for which the keys of `sinks` first positions are made at once."""
    return max(1, READY // max(sinks, 1))


class Rerotation:
    """The sinks and the frame of one layer.

    Frame position of an entry = its position - base of its sequence; sinks excepted, which lie right before the
    oldest recent entry.

    Args:
        rotary: The model's.
        sinks: How many first positions stay.
    """

    def __init__(self, rotary: RotaryEmbedding, sinks: int) -> None:
        self._rotary = rotary
        self._sinks = sinks
        self._ahead = places_ahead(sinks)
        self._base: np.ndarray = np.zeros(0, dtype=np.int64)
        self._keys: Tensor | None = None  # (S, H, sinks, key_dim), unrotated
        self._ready: Tensor | None = None  # (ahead, S, H, sinks, key_dim): at as many places in a row
        self._ready_from: np.ndarray = self._base  # (S,) frame position of the first sink at the first of them
        self._placed: tuple[Tensor, list[int], SlotWriter] | None = (
            None  # page ids, sequences, and where their sinks lie
        )

    @property
    def frames(self) -> np.ndarray:
        """By how much the keys of each sequence were turned back, (S,); where this changes, so do all its keys.

        The keys of sinks change at each step, and are put in place before they are read.
        """
        return self._base

    def copy(self, sequences: list[int] | None = None) -> Rerotation:
        """Return a copy that changes on its own, of the given sequences in this order, or of all."""
        other = Rerotation(self._rotary, self._sinks)
        if sequences == [] or self._keys is None:
            return other
        chosen = list(range(len(self._base))) if sequences is None else sequences
        other._base, other._keys = self._base[chosen], self._keys[chosen]
        return other

    def join(self, other: Rerotation, n_seq: int) -> None:
        """Take over the sequences of `other`, after the `n_seq` of this batch; both have seen their prompts."""
        assert self._keys is not None, "a sequence joins others when its prompt was read"
        assert other._keys is not None, "a sequence joins others when its prompt was read"
        assert len(self._base) == n_seq, "one frame per sequence"
        self._base = np.concatenate([self._base, other._base])
        self._keys = torch.cat([self._keys, other._keys])
        self._ready = None  # opened again, for all

    def tensors(self, sequence: int) -> dict[str, Tensor]:
        """See `CacheRelativePositions`."""
        assert self._keys is not None, "a sequence is stored when its prompt was read"
        return {"base": torch.tensor(int(self._base[sequence])), "keys": self._keys[sequence]}

    def adopt(self, stored: dict[str, Tensor]) -> None:
        """See `CacheRelativePositions`."""
        self._base, self._keys = np.array([int(stored["base"])], dtype=np.int64), stored["keys"][None]
        self._ready = None  # opened again, of these keys

    def step(self, table: PageTable, q: Tensor, k: Tensor, positions: np.ndarray) -> tuple[Tensor, Tensor]:
        """Before a decoding step: bring queries and keys (S, heads, D) into the frame and the sinks into place.

        positions (S,): of the new tokens, -1 where a sequence has none.
        """
        self._open(table, k)
        if (positions - self._base).max() >= EPOCH:
            for sequence in np.flatnonzero(positions - self._base >= self._epoch(table)):
                self._rebase(table, int(sequence), int(positions[sequence]))
        if positions.min() < self._sinks:
            self._capture(k[:, :, None], positions[:, None])
        self._place(table, positions)
        return frame_step(self._rotary, q, k, positions, self._base)

    def prefill(self, table: PageTable, sequence: int, q: Tensor, k: Tensor, q_pos: Tensor) -> tuple[Tensor, Tensor]:
        """Before a pass of many tokens of one sequence: the same for queries and keys (heads, Q, D)."""
        self._open(table, k)
        positions = q_pos.cpu().numpy().astype(np.int64)
        if positions[0] - self._base[sequence] >= self._epoch(table):
            self._rebase(table, sequence, int(positions[0]))
        self._capture(k[None], positions[None], sequence)
        self._place(table, np.where(np.arange(table.n_seq) == sequence, positions[0], -1))
        return frame_prompt(self._rotary, q, k, positions, int(self._base[sequence]))

    def places(self, sequence: int, at: Tensor) -> Tensor:
        """See `CacheRelativePositions`; of sinks, which `restart` makes of unrotated ones, this says nothing."""
        base = int(self._base[sequence]) if sequence < len(self._base) else 0
        return (at - base).clamp(min=0)

    def restart(self, table: PageTable, sequence: int) -> None:
        """See `CacheRelativePositions`."""
        if len(self._base) != table.n_seq or self._keys is None:
            return
        self._base[sequence] = 0
        if self._sinks and int(table.lengths()[sequence, 0]) > self._sinks:
            places = torch.arange(self._sinks, device=self._keys.device)[None]
            keys = self._rotary.rotate(self._keys[sequence][None], places)
            self._places(table, [sequence]).put(table.pool.arrays.keys, keys.to(table.pool.arrays.dtype).flatten(0, 2))

    # ------------------------------------------------------------------ internal

    def _open(self, table: PageTable, k: Tensor) -> None:
        if len(self._base) != table.n_seq:
            self._base = np.zeros(table.n_seq, dtype=np.int64)
        if self._keys is None:
            shape = (table.n_seq, table.n_kv_heads, self._sinks, k.shape[-1])
            self._keys = torch.zeros(shape, dtype=torch.promote_types(k.dtype, torch.float32), device=k.device)
        if self._ready is None or self._ready.dtype != table.pool.arrays.dtype:
            self._ready = torch.zeros(self._ahead, *self._keys.shape, dtype=table.pool.arrays.dtype, device=k.device)
            self._ready_from = np.full(table.n_seq, -self._ahead)

    def _epoch(self, table: PageTable) -> int:
        return max(EPOCH, 2 * int(table.lengths().max(initial=0)))

    def _capture(self, k: Tensor, positions: np.ndarray, sequence: int | None = None) -> None:
        """Remember the sinks among new keys (B, H, n, D), unrotated."""
        assert self._keys is not None
        for b, row in enumerate(positions):
            columns = np.flatnonzero((row >= 0) & (row < self._sinks))
            if not len(columns):
                continue
            places = torch.from_numpy(row[columns]).to(k.device)
            own = k[b : b + 1, :, torch.from_numpy(columns).to(k.device)]
            target = b if sequence is None else sequence
            unrotated = self._rotary.rotate(own, places[None], inverse=True)[0]
            self._keys[target][:, places] = unrotated.to(self._keys.dtype)
            self._ready_from[target] = -self._ahead  # made of other sinks

    def _place(self, table: PageTable, positions: np.ndarray) -> None:
        """Put the sinks' keys where they belong before queries at `positions` (S,), -1 for none."""
        held = table.lengths()[:, 0]
        first = positions - held  # where the first sink belongs, in the text
        moved = np.flatnonzero((held > self._sinks) & (first > 0))
        if self._sinks and len(moved):
            keys = self._at(moved, (first - self._base)[moved])
            self._places(table, moved.tolist()).put(table.pool.arrays.keys, keys.flatten(0, 2))

    def _places(self, table: PageTable, sequences: list[int]) -> SlotWriter:
        """Where the sinks of some sequences lie: they came first and never left, so in the first slots."""
        placed = self._placed
        if placed is None or placed[0] is not table.pages or placed[1] != sequences:
            ids, _ = slots_of(table, table.pages, torch.full_like(table.lens, self._sinks), self._sinks)
            chosen = ids.view(table.n_seq, -1)[sequences].flatten()
            placed = self._placed = table.pages, sequences, SlotWriter(table.pool.arrays.keys, chosen)
        return placed[2]

    def _at(self, sequences: np.ndarray, first: np.ndarray) -> Tensor:
        """Return the sinks of some sequences , (n, H, sinks, key_dim)(n,), at the places `first` (n,) and behind."""
        assert self._ready is not None
        place = first - self._ready_from[sequences]
        missing = (place < 0) | (place >= self._ahead)
        if missing.any():
            self._make_ready(sequences[missing].tolist(), first[missing])
            place[missing] = 0
        which = torch.from_numpy(place * self._ready.shape[1] + sequences).to(self._ready.device)
        return self._ready.flatten(0, 1).index_select(0, which)

    def _make_ready(self, sequences: list[int], first: np.ndarray) -> None:
        """Rotate the sinks of some sequences to `first` (n,) and to the places after it."""
        assert self._keys is not None
        assert self._ready is not None
        keys = self._keys[sequences][:, :, None].expand(-1, -1, self._ahead, -1, -1)  # (n, H, ahead, sinks, key_dim)
        frames = first[:, None, None] + np.arange(self._ahead)[:, None] + np.arange(self._sinks)
        places = torch.from_numpy(frames.reshape(len(first), -1)).to(keys.device)
        turned = self._rotary.rotate(keys.flatten(2, 3), places)
        self._ready[:, sequences] = turned.view(keys.shape).permute(2, 0, 1, 3, 4).to(self._ready.dtype)
        self._ready_from[sequences] = first

    def _rebase(self, table: PageTable, sequence: int, position: int) -> None:
        """Move a sequence's frame so that its oldest recent entry lies right after the sinks."""
        dense = stored(table, sequence)
        oldest_recent = position - (dense.keys.shape[1] - self._sinks)
        base = max(0, oldest_recent - self._sinks)
        at = dense.positions.long()
        old, new = ((at - b).clamp(min=0) for b in (int(self._base[sequence]), base))
        turn(self._rotary, table, sequence, dense, old, new)
        self._base[sequence] = base
