"""LagKV: scores relative to the chunk of text that follows an entry (Liang et al., 2025, arXiv:2504.04704)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from millpond.errors import OptionError
from millpond.kernels.decode_rules import Evict, Signal
from millpond.methods import method
from millpond.methods._options import Chunk, ChunkedPrefill, Grow, Sinks
from millpond.option_ranges import MAX_POSITIONS, Range
from millpond.policy.policy import Policy
from millpond.policy.protect import Protect
from millpond.policy.scores.attention import Queries
from millpond.policy.scores.chunk_layout import ChunkLayout
from millpond.policy.view import View


@dataclass(frozen=True, slots=True)
class LagRelative:
    """Scores of chunks of `lag` positions by the range of the next chunk that has entries.

    u_jd = (x_jd - min_d) / (max_d - min_d) with the range of channel d in the next chunk; the spread of entry j is the
    softmax over its chunk of std_d(u_jd), averaged over keys and values. Each chunk evicts its lowest first, all
    chunks in step (`across`: the lowest of all chunks). The newest full chunk and what follows it have no full chunk
    after them: they stay before all others, the newest first.

    Attributes:
        lag: Positions of a chunk.
        sinks: Positions before the first chunk.
        across: Compare entries of all chunks.
    """

    lag: int = 128
    sinks: int = 0
    across: bool = False
    queries: Queries = "none"
    window: int = 0
    signal: Signal = Signal.NONE
    evict: Evict | None = None

    def __post_init__(self) -> None:
        if self.lag < 2:
            raise OptionError(f"lag={self.lag} must be at least 2, so that a chunk has a range")

    def score(self, view: View, seed: int) -> Tensor:
        newest = 1 + view.positions / max(view.seen, 1)
        n_chunks = (view.seen - self.sinks) // self.lag  # full ones
        if n_chunks < 2:
            return newest
        chunks = ChunkLayout.of(view.positions, self.sinks, self.lag, n_chunks)
        spread = (lag_relative(view.keys, chunks) + lag_relative(view.values, chunks)) / 2
        # NaN stays NaN, for the plan to report
        value = spread if self.across else 0 * spread - chunks.ranks(spread) / self.lag
        measured = ChunkLayout(chunks.columns[:, :-1], chunks.present[:, :-1])
        return measured.put(value[:, :-1].float(), newest)


def lag_relative(x: Tensor, chunks: ChunkLayout) -> Tensor:
    """Return (H, n, width): the softmax over its chunk of the spread of each x (H, N, D)."""
    rows, present = chunks.take(x), chunks.present
    if bool(present.all()):
        low, high = rows.amin(2), rows.amax(2)
    else:
        none = ~present[..., None]
        low, high = rows.masked_fill(none, float("inf")).amin(2), rows.masked_fill(none, float("-inf")).amax(2)
    next_present = next_filled(present.any(-1))[..., None]
    chunk_index = next_present.clamp(max=len(low[0]) - 1).expand_as(low)
    low, high = low.gather(1, chunk_index), high.gather(1, chunk_index)
    has_range = (high > low) & (next_present < len(low[0]))
    away = rows - torch.where(has_range, low, 0)[:, :, None]
    scaled = away.div_(torch.where(has_range, high - low, float("inf"))[:, :, None])
    varied = scaled.sub_(scaled.mean(-1, keepdim=True))
    spread: Tensor = torch.linalg.vector_norm(varied, dim=-1) / (x.shape[-1] - 1) ** 0.5
    return spread.masked_fill(~present, float("-inf")).softmax(-1)


def next_filled(filled: Tensor) -> Tensor:
    """Return (H, n): for each chunk the first later one that is filled (H, n), or n."""
    n = filled.shape[1]
    number = torch.arange(n, device=filled.device).expand_as(filled)
    later = torch.where(filled, number, n).roll(-1, 1)
    later[:, -1] = n
    return later.flip(1).cummin(1).values.flip(1)


@method("lagkv", paper="arXiv:2504.04704")
def lagkv(
    lag: Annotated[int, "positions of a chunk; each is measured by the next one", Range(2, MAX_POSITIONS)] = 128,
    sinks: Sinks = 4,
    across: Annotated[bool, "compare the entries of all chunks; else every chunk keeps the same number"] = False,
    prefill: ChunkedPrefill = "once",
    chunk: Chunk = 256,
    decode: Grow = "grow",
) -> Policy:
    """Keep the entries whose keys and values stand out against the next chunk of text.

    After the sinks the text is cut into chunks of `lag` positions. Keys and values of a chunk are scaled, channel by
    channel, by the minimum and maximum of the next chunk; the standard deviation over channels, softmax over the
    chunk, averaged over keys and values, is the score. Every chunk keeps its best; the last full chunk and the rest
    after it have no reference and stay. No attention is observed.

    A text shorter than sinks + 2 * lag has no reference at all, and a budget below sinks + lag has no room for more
    than what stays: there the newest entries are kept.

    Departs from the paper: the budget is met exactly, so chunks may differ by one entry. While the text grows,
    chunks keep their places, and all evict entries in step. decode="evict" does so at each step, which ends with a
    plan and is slow; the paper waits for a chunk to fill.
    """
    return Policy(
        score=LagRelative(lag=lag, sinks=sinks, across=across),
        protect=Protect(sinks=sinks),
        prefill=prefill,
        chunk=chunk,
        every_step=decode == "evict",
        once=decode == "once",
    )
