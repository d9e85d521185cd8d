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
    """Map of the queries and keys of one layer to positions inside the cache."""

    @property
    def frames(self) -> np.ndarray:
        """Offset by which the keys of each sequence were turned back, (S,).

        Stored keys change if and only if it does.
        """
        ...

    def copy(self, sequences: list[int] | None = None) -> CacheRelativePositions:
        """Return an independent copy of the given sequences in this order, or of all."""
        ...

    def join(self, other: Any, n_seq: int) -> None:
        """Take the sequences of `other`, of the same kind, after the `n_seq` of this batch."""
        ...

    def tensors(self, sequence: int) -> dict[str, Tensor]:
        """Return the state of one sequence, for `adopt`."""
        ...

    def adopt(self, stored: dict[str, Tensor]) -> None:
        """Take the state of one sequence, which `tensors` of another layer returned.

        Raises:
            KeyError: a tensor is missing.
        """
        ...

    def step(self, table: PageTable, q: Tensor, k: Tensor, positions: np.ndarray) -> tuple[Tensor, Tensor]:
        """Return the queries and keys (S, heads, D) of a decoding step in the frame.

        `positions` (S,) are those of the new tokens, -1 for none.
        """
        ...

    def prefill(self, table: PageTable, sequence: int, q: Tensor, k: Tensor, q_pos: Tensor) -> tuple[Tensor, Tensor]:
        """Return the queries and keys (heads, Q, D) of many tokens of one sequence in the frame."""
        ...

    def frame_positions(self, sequence: int, at: Tensor) -> Tensor:
        """Return the frame positions (H, n) of entries at positions `at` (H, n); 0 for no entry."""
        ...

    def restart(self, table: PageTable, sequence: int) -> None:
        """Restart the frame of a sequence whose entries have their positions as frame positions."""
        ...


def to_frame(rotary: RotaryEmbedding, x: Tensor, positions: np.ndarray, base: np.ndarray) -> Tensor:
    """Rotate x (B, H, n, D) from `positions` (B, n) to positions - base.

    `base` has shape (B, n) or (B, 1).
    """
    text_positions = torch.from_numpy(np.maximum(positions, 0)).to(x.device)
    frame_positions = torch.from_numpy(np.maximum(positions - base, 0)).to(x.device)
    return rotary.rotate(rotary.rotate(x, text_positions, inverse=True), frame_positions).to(x.dtype)


def frame_step(
    rotary: RotaryEmbedding, q: Tensor, k: Tensor, positions: np.ndarray, base: np.ndarray
) -> tuple[Tensor, Tensor]:
    """Return the queries and keys (S, heads, D) of a decoding step in the frame.

    They are rotated from `positions` (S,) to positions - base (S,).
    """
    if not base.any():
        return q, k
    heads = torch.cat([q, k], 1)[:, :, None]
    framed = to_frame(rotary, heads, positions[:, None], base[:, None])[:, :, 0]
    return framed[:, : q.shape[1]], framed[:, q.shape[1] :]


def frame_prompt(
    rotary: RotaryEmbedding, q: Tensor, k: Tensor, positions: np.ndarray, base: int
) -> tuple[Tensor, Tensor]:
    """Return the queries and keys (heads, Q, D) of one sequence in the frame.

    They are rotated from `positions` (Q,) to positions - base.
    """
    if base == 0:
        return q, k
    shift = np.array([[base]])
    return (to_frame(rotary, q[None], positions[None], shift)[0], to_frame(rotary, k[None], positions[None], shift)[0])


def stored(table: PageTable, sequence: int) -> PaddedEntries:
    """Return the entries of a sequence, one row per head, to be written again."""
    table.copy_on_write(whole=True)
    width = int(table.lengths()[sequence].max(initial=0))
    return ops.read(table.regions_of(table.rows(sequence)), width)


def rewrite_keys(
    rotary: RotaryEmbedding | None, table: PageTable, sequence: int, dense: PaddedEntries, old: Tensor, new: Tensor
) -> None:
    """Write the entries of a sequence again, with keys rotated from `old` to `new` (H, n).

    `rotary` is None for keys that have no rotary position.
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
#: Keys of a head's sinks that are made at once, for as many positions as they suffice.
KEYS_MADE_AT_ONCE = 128


def positions_ahead(sinks: int) -> int:
    """Return the number of successive positions for which keys of sinks are made at once."""
    return max(1, KEYS_MADE_AT_ONCE // max(sinks, 1))


class Rerotation:
    """Sinks and frame of one layer.

    Frame position of an entry = its position - base of its sequence; except for sinks, which are right before the
    oldest recent entry.

    Args:
        rotary: Rotary embedding of the model.
        sinks: How many first positions stay.
    """

    def __init__(self, rotary: RotaryEmbedding, sinks: int) -> None:
        self._rotary = rotary
        self._sinks = sinks
        self._ahead = positions_ahead(sinks)
        self._base: np.ndarray = np.zeros(0, dtype=np.int64)
        self._keys: Tensor | None = None  # (S, H, sinks, key_dim), unrotated
        self._ready: Tensor | None = None  # (ahead, S, H, sinks, key_dim): at successive positions
        self._ready_from: np.ndarray = self._base  # (S,) frame position of the first sink at the first of them
        self._sink_writer: tuple[Tensor, list[int], SlotWriter] | None = (
            None  # page ids, sequences, and the writer of their sinks
        )

    @property
    def frames(self) -> np.ndarray:
        """Offset by which the keys of each sequence were turned back, (S,).

        All its keys change if it does. The keys of sinks change at each step, and are written before they are read.
        """
        return self._base

    def copy(self, sequences: list[int] | None = None) -> Rerotation:
        """Return an independent copy of the given sequences in this order, or of all."""
        other = Rerotation(self._rotary, self._sinks)
        if sequences == [] or self._keys is None:
            return other
        selected = list(range(len(self._base))) if sequences is None else sequences
        other._base, other._keys = self._base[selected], self._keys[selected]
        return other

    def join(self, other: Rerotation, n_seq: int) -> None:
        """Take the sequences of `other`, after the `n_seq` of this batch.

        The prompts of both were read.
        """
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
        """Bring queries and keys (S, heads, D) into the frame and write the sinks, before a step.

        `positions` (S,) are those of the new tokens, -1 if a sequence has none.
        """
        self._open(table, k)
        if (positions - self._base).max() >= EPOCH:
            for sequence in np.flatnonzero(positions - self._base >= self._epoch(table)):
                self._rebase(table, int(sequence), int(positions[sequence]))
        if positions.min() < self._sinks:
            self._capture(k[:, :, None], positions[:, None])
        self._write_sinks(table, positions)
        return frame_step(self._rotary, q, k, positions, self._base)

    def prefill(self, table: PageTable, sequence: int, q: Tensor, k: Tensor, q_pos: Tensor) -> tuple[Tensor, Tensor]:
        """Bring queries and keys (heads, Q, D) of one sequence into the frame, before a pass."""
        self._open(table, k)
        positions = q_pos.cpu().numpy().astype(np.int64)
        if positions[0] - self._base[sequence] >= self._epoch(table):
            self._rebase(table, sequence, int(positions[0]))
        self._capture(k[None], positions[None], sequence)
        self._write_sinks(table, np.where(np.arange(table.n_seq) == sequence, positions[0], -1))
        return frame_prompt(self._rotary, q, k, positions, int(self._base[sequence]))

    def frame_positions(self, sequence: int, at: Tensor) -> Tensor:
        """See `CacheRelativePositions`; not valid for sinks, which `restart` makes anew."""
        base = int(self._base[sequence]) if sequence < len(self._base) else 0
        return (at - base).clamp(min=0)

    def restart(self, table: PageTable, sequence: int) -> None:
        """See `CacheRelativePositions`."""
        if len(self._base) != table.n_seq or self._keys is None:
            return
        self._base[sequence] = 0
        if self._sinks and int(table.lengths()[sequence, 0]) > self._sinks:
            sink_positions = torch.arange(self._sinks, device=self._keys.device)[None]
            keys = self._rotary.rotate(self._keys[sequence][None], sink_positions)
            self._writer_of(table, [sequence]).put(
                table.pool.arrays.keys, keys.to(table.pool.arrays.dtype).flatten(0, 2)
            )

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
            sink_positions = torch.from_numpy(row[columns]).to(k.device)
            sink_keys = k[b : b + 1, :, torch.from_numpy(columns).to(k.device)]
            target = b if sequence is None else sequence
            unrotated = self._rotary.rotate(sink_keys, sink_positions[None], inverse=True)[0]
            self._keys[target][:, sink_positions] = unrotated.to(self._keys.dtype)
            self._ready_from[target] = -self._ahead  # made of other sinks

    def _write_sinks(self, table: PageTable, positions: np.ndarray) -> None:
        """Write the sinks' keys before queries at `positions` (S,), -1 for none."""
        n_entries = table.lengths()[:, 0]
        first = positions - n_entries  # where the first sink belongs, in the text
        moved = np.flatnonzero((n_entries > self._sinks) & (first > 0))
        if self._sinks and len(moved):
            keys = self._sink_keys(moved, (first - self._base)[moved])
            self._writer_of(table, moved.tolist()).put(table.pool.arrays.keys, keys.flatten(0, 2))

    def _writer_of(self, table: PageTable, sequences: list[int]) -> SlotWriter:
        """Return a writer for the sinks of some sequences, which are always in the first slots."""
        cached = self._sink_writer
        if cached is None or cached[0] is not table.pages or cached[1] != sequences:
            ids, _ = slots_of(table, table.pages, torch.full_like(table.lens, self._sinks), self._sinks)
            slots = ids.view(table.n_seq, -1)[sequences].flatten()
            cached = self._sink_writer = table.pages, sequences, SlotWriter(table.pool.arrays.keys, slots)
        return cached[2]

    def _sink_keys(self, sequences: np.ndarray, first: np.ndarray) -> Tensor:
        """Return the sinks of sequences (n,) at positions `first` (n,) and after it.

        They have shape (n, H, sinks, key_dim).
        """
        assert self._ready is not None
        offset = first - self._ready_from[sequences]
        missing = (offset < 0) | (offset >= self._ahead)
        if missing.any():
            self._make_ready(sequences[missing].tolist(), first[missing])
            offset[missing] = 0
        rows = torch.from_numpy(offset * self._ready.shape[1] + sequences).to(self._ready.device)
        return self._ready.flatten(0, 1).index_select(0, rows)

    def _make_ready(self, sequences: list[int], first: np.ndarray) -> None:
        """Rotate the sinks of some sequences to `first` (n,) and to the positions after it."""
        assert self._keys is not None
        assert self._ready is not None
        keys = self._keys[sequences][:, :, None].expand(-1, -1, self._ahead, -1, -1)  # (n, H, ahead, sinks, key_dim)
        frames = first[:, None, None] + np.arange(self._ahead)[:, None] + np.arange(self._sinks)
        frame_positions = torch.from_numpy(frames.reshape(len(first), -1)).to(keys.device)
        turned = self._rotary.rotate(keys.flatten(2, 3), frame_positions)
        self._ready[:, sequences] = turned.view(keys.shape).permute(2, 0, 1, 3, 4).to(self._ready.dtype)
        self._ready_from[sequences] = first

    def _rebase(self, table: PageTable, sequence: int, position: int) -> None:
        """Move a sequence's frame so that its oldest recent entry comes right after the sinks."""
        dense = stored(table, sequence)
        oldest_recent = position - (dense.keys.shape[1] - self._sinks)
        base = max(0, oldest_recent - self._sinks)
        at = dense.positions.long()
        old, new = ((at - b).clamp(min=0) for b in (int(self._base[sequence]), base))
        rewrite_keys(self._rotary, table, sequence, dense, old, new)
        self._base[sequence] = base
