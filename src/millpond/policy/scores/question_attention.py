"""Attention of the question, the last tokens of the text (Finch)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from millpond.errors import OptionError
from millpond.kernels.decode_rules import Evict, Signal
from millpond.policy.scores.attention import Queries
from millpond.policy.scores.chunk_layout import ChunkLayout
from millpond.policy.view import View


@dataclass(frozen=True, slots=True)
class QuestionAttention:
    """s_j = sum_i A_ij / n_j over the last `window` queries i, n_j how many of them come at or after j.

    With `chunk` every chunk of `chunk` positions keeps the same share of its free entries, its best.
    """

    window: int
    chunk: int = 0
    queries: Queries = "window"
    signal: Signal = Signal.SUM
    evict: Evict = Evict.ACC

    def __post_init__(self) -> None:
        if self.window < 1:
            raise OptionError(f"window={self.window} must be at least 1")
        if self.chunk < 0:
            raise OptionError(f"chunk={self.chunk} must not be negative; 0 takes the text as a whole")

    def score(self, view: View, seed: int) -> Tensor:
        assert view.signal is not None, "the cache provides the signal that a score declares"
        value = view.signal / (view.seen - view.positions).clamp(1, self.window)
        if not self.chunk:
            return value
        chunks = ChunkLayout.of(view.positions, 0, self.chunk, -(-view.seen // self.chunk)).only(view.free)
        entries = chunks.present.sum(-1, keepdim=True).clamp(min=1)
        # NaN stays NaN, for the plan to report
        return chunks.put(0 * chunks.take(value) - chunks.ranks(chunks.take(value)) / entries, value)
