"""Finch: selection of context by the question at the end (Corallo and Papotti, TACL 2024, arXiv:2408.00167)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from millpond.errors import OptionError
from millpond.kernels.decode_rules import Evict, Signal
from millpond.methods import method
from millpond.methods._options import GroupReduce, GrowOrEvict, SinksAdded
from millpond.option_ranges import POSITIONS, QUERIES
from millpond.policy.policy import Policy
from millpond.policy.protect import Protect
from millpond.policy.scores.attention import Queries
from millpond.policy.scores.chunk_layout import ChunkLayout
from millpond.policy.view import View


@dataclass(frozen=True, slots=True)
class QuestionAttention:
    """s_j = sum_i A_ij / n_j over the last `window` queries i.

    n_j is how many of them come at or after j.
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


@method("finch", paper="arXiv:2408.00167")
def finch(
    window: Annotated[int, "tokens of the question, the last of the prompt", QUERIES] = 32,
    chunk: Annotated[int, "positions of a chunk of the context, which all keep the same share; 0: none", POSITIONS] = 0,
    keep_question: Annotated[bool, "the question's own entries always stay"] = True,
    reduce: GroupReduce = "mean",
    sinks: SinksAdded = 0,
    decode: GrowOrEvict = "grow",
) -> Policy:
    """Keep what the question at the prompt's end attends to, from every chunk of the context.

    s_j = sum_i A_ij / n_j over the queries i of the question, n_j the number of them that can see entry j, so that
    entries of the question itself, which fewer queries see, compete fairly with the context. The best entries stay.
    With `chunk` each chunk of the context keeps the same share, and none is forgotten.

    Departs from the paper: it reads the context chunk by chunk with the question after each, and lets later chunks
    see only what was kept; here the prompt is read once and whole, and its chunks are compressed together at its end.
    Read a prompt in passes with between_chunks=False, or each pass is compressed by its own last tokens. Its official
    code multiplies each query's attention by the number of entries that it sees instead. Kept keys stay at their
    positions: the paper turns them to close the gaps, and here these differ from head to head. decode="evict" keeps
    the budget while decoding, by the attention accumulated since the prompt's end.
    """
    return Policy(
        score=QuestionAttention(window, chunk),
        protect=Protect(sinks=sinks, recent=window if keep_question else 0),
        reduce=reduce,
        every_step=decode == "evict",
    )
