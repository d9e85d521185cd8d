"""LagRelative: how much an entry spreads when it is measured by the range of the chunk of text behind it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from millpond.errors import OptionError
from millpond.kernels.rules import Evict, Signal
from millpond.policy.score import Queries
from millpond.policy.view import View


@dataclass(frozen=True, slots=True)
class LagRelative:
    """Chunks of `lag` positions behind the sinks, each scored by the range of the next one that still has entries.

    u_jd = (x_jd - min_d) / (max_d - min_d) with the range of channel d in the next chunk; the spread of entry j is the
    softmax over its chunk of std_d(u_jd), averaged over keys and values. Each chunk gives up its lowest first, all
    chunks in step (`across`: the lowest of all chunks). The newest full chunk and what follows it have no full chunk
    behind them: they stay before all others, the newest first.

    Attributes:
        lag: positions of a chunk. sinks: positions before the first chunk. across: compare entries of all chunks.
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
        chunk = torch.div(view.positions.long() - self.sinks, self.lag, rounding_mode="floor")
        n_chunks = (view.seen - self.sinks) // self.lag  # full ones
        if n_chunks < 2:
            return newest
        scored = view.valid & (chunk >= 0) & (chunk < n_chunks - 1)
        chunk = torch.where(view.valid & (chunk >= 0) & (chunk < n_chunks), chunk, n_chunks)
        spread = (lag_relative(view.keys, chunk, n_chunks) + lag_relative(view.values, chunk, n_chunks)) / 2
        # NaN stays NaN, for the plan to report
        value = spread if self.across else 0 * spread - place_in_chunk(spread, chunk) / self.lag
        return torch.where(scored, value, newest).float()


def lag_relative(x: Tensor, chunk: Tensor, n_chunks: int) -> Tensor:
    """(H, N): the softmax over its chunk of the spread of each x (H, N, D); the chunk n_chunks means none."""
    size = (x.shape[0], n_chunks + 1, x.shape[2])
    index = chunk[..., None].expand_as(x)
    low = x.new_full(size, float("inf")).scatter_reduce(1, index, x, "amin")
    high = x.new_full(size, float("-inf")).scatter_reduce(1, index, x, "amax")
    behind = next_filled(chunk, n_chunks).gather(1, chunk)[..., None].expand_as(x)
    low, high = low.gather(1, behind), high.gather(1, behind)
    has_range = (high > low) & (behind < n_chunks)
    spread = torch.where(has_range, (x - low) / torch.where(has_range, high - low, 1), 0).std(-1)
    flat = size[:2]
    top = spread.new_full(flat, float("-inf")).scatter_reduce(1, chunk, spread, "amax")
    weight = (spread - top.gather(1, chunk)).exp()
    return weight / weight.new_zeros(flat).scatter_add(1, chunk, weight).gather(1, chunk)


def next_filled(chunk: Tensor, n_chunks: int) -> Tensor:
    """(H, n_chunks + 1): for each chunk the first later one that has entries; n_chunks where none has."""
    number = torch.arange(n_chunks + 1, device=chunk.device).expand(len(chunk), -1)
    filled = torch.zeros_like(number).scatter(1, chunk, 1).bool()
    later = torch.where(filled, number, n_chunks)[:, 1:]
    first = later.flip(1).cummin(1).values.flip(1)
    return torch.cat([first, number[:, -1:]], 1)


def place_in_chunk(value: Tensor, chunk: Tensor) -> Tensor:
    """(H, N): behind how many of its own chunk an entry ranks, ties to the newest. Columns ascend in position."""
    order = value.shape[1] - 1 - torch.sort(value.flip(1), dim=1, descending=True, stable=True).indices
    order = order.gather(1, torch.sort(chunk.gather(1, order), dim=1, stable=True).indices)
    sorted_chunk = chunk.gather(1, order)
    place = torch.arange(value.shape[1], device=value.device).expand_as(order)
    first = torch.searchsorted(sorted_chunk, sorted_chunk)
    return torch.empty_like(order).scatter_(1, order, place - first)
