"""Cache-relative positions of entries that were kept anywhere in a text, such as heavy hitters.

Heads keep different entries, and each eviction leaves a gap. Closing each gap at once would rotate about half of the
stored keys in each step. Instead gaps stay until the newest token is at the end of the positions that the model was
trained on; then all are closed together: the entries of each head move to consecutive positions before the newest
token, in their order. Between two closings all distances are those of the text.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from millpond.cache.pages.page_table import PageTable
from millpond.cache.state.rerotation import frame_prompt, frame_step, rewrite_keys, stored
from millpond.cache.types import PerSequence, RotaryEmbedding

#: Positions between two closings at least, where the budget is near the reach of the model, or above.
MIN_CLOSING_DISTANCE = 256


class GapClosing:
    """Frames of one layer.

    Frame position of a token that was written since the last closing = its position - base of its sequence; older
    entries have the frame positions of the closing.

    Args:
        rotary: Rotary embedding of the model.
        reach: Positions that the model was trained on.
    """

    def __init__(self, rotary: RotaryEmbedding, reach: int) -> None:
        self._rotary = rotary
        self._reach = reach
        self._base: np.ndarray = np.zeros(0, dtype=np.int64)
        self._closed: PerSequence[tuple[Tensor, Tensor]] = (
            PerSequence()
        )  # (H, n) positions, ascending, and frame positions

    @property
    def frames(self) -> np.ndarray:
        """See `CacheRelativePositions`."""
        return self._base

    def copy(self, sequences: list[int] | None = None) -> GapClosing:
        """See `CacheRelativePositions`."""
        other = GapClosing(self._rotary, self._reach)
        if sequences == [] or not len(self._base):
            return other
        other._base = self._base.copy() if sequences is None else self._base[sequences]
        other._closed = self._closed.copy(sequences)
        return other

    def join(self, other: GapClosing, n_seq: int) -> None:
        """See `CacheRelativePositions`."""
        bases = [_padded(self._base, n_seq), other._base]
        self._base = np.concatenate(bases)
        self._closed.join(other._closed, n_seq)

    def tensors(self, sequence: int) -> dict[str, Tensor]:
        """See `CacheRelativePositions`."""
        base = int(self._base[sequence]) if sequence < len(self._base) else 0
        tensors = {"base": torch.tensor(base)}
        if sequence in self._closed:
            tensors["positions"], tensors["places"] = self._closed[sequence]
        return tensors

    def adopt(self, stored: dict[str, Tensor]) -> None:
        """See `CacheRelativePositions`."""
        self._base = np.array([int(stored["base"])], dtype=np.int64)
        if "positions" in stored:
            self._closed[0] = stored["positions"], stored["places"]

    def step(self, table: PageTable, q: Tensor, k: Tensor, positions: np.ndarray) -> tuple[Tensor, Tensor]:
        """See `CacheRelativePositions`."""
        self._base = _padded(self._base, table.n_seq)
        if (positions - self._base).max() >= self._reach:
            lengths = table.lengths().max(1)
            limits = np.maximum(self._reach, lengths + MIN_CLOSING_DISTANCE)
            for sequence in np.flatnonzero(positions - self._base >= limits):
                self._close(table, int(sequence), int(positions[sequence]))
        return frame_step(self._rotary, q, k, positions, self._base)

    def prefill(self, table: PageTable, sequence: int, q: Tensor, k: Tensor, q_pos: Tensor) -> tuple[Tensor, Tensor]:
        """See `CacheRelativePositions`. Gaps close before a pass that would end after the reach."""
        self._base = _padded(self._base, table.n_seq)
        positions = q_pos.cpu().numpy().astype(np.int64)
        n_entries = int(table.lengths()[sequence].max(initial=0))
        end, span = positions[-1] - self._base[sequence], positions[0] - self._base[sequence] - n_entries
        if n_entries and end >= self._reach and span >= min(MIN_CLOSING_DISTANCE, len(positions)):
            self._close(table, sequence, int(positions[0]))
        return frame_prompt(self._rotary, q, k, positions, int(self._base[sequence]))

    def frame_positions(self, sequence: int, at: Tensor) -> Tensor:
        """See `CacheRelativePositions`."""
        base = int(self._base[sequence]) if sequence < len(self._base) else 0
        frames = (at - base).clamp(min=0)
        if sequence not in self._closed:
            return frames
        positions, closed_positions = self._closed[sequence]
        index = torch.searchsorted(positions, at.contiguous()).clamp(max=positions.shape[1] - 1)
        older = (positions.gather(1, index) == at) & (at >= 0)
        return torch.where(older, closed_positions.gather(1, index), frames)

    def restart(self, table: PageTable, sequence: int) -> None:
        """See `CacheRelativePositions`."""
        self._closed.pop(sequence, None)
        if sequence < len(self._base):
            self._base[sequence] = 0

    def _close(self, table: PageTable, sequence: int, position: int) -> None:
        """Move all entries of a sequence to consecutive positions before the token at `position`."""
        dense = stored(table, sequence)
        at = dense.positions.long()
        width = at.shape[1]
        by_position = at.masked_fill(at < 0, position)  # slots without an entry come last
        order = by_position.argsort(1)
        ranks = torch.empty_like(order).scatter_(1, order, torch.arange(width, device=at.device).expand_as(order))
        n_entries = (at >= 0).sum(1, keepdim=True)
        new = (width - n_entries + ranks).masked_fill(at < 0, 0)
        rewrite_keys(self._rotary, table, sequence, dense, self.frame_positions(sequence, at), new)
        self._closed[sequence] = by_position.gather(1, order), new.gather(1, order)
        self._base[sequence] = position - width


def _padded(base: np.ndarray, n_seq: int) -> np.ndarray:
    """Return the frames of `n_seq` sequences; those of new ones begin with the text."""
    return np.concatenate([base, np.zeros(n_seq - len(base), dtype=np.int64)]) if len(base) < n_seq else base
