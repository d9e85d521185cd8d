"""Share of spans of a prompt that a cache has lost."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from millpond.cache.layer.layer_cache import LayerCache
from millpond.cache.state.positions import PositionTracker
from millpond.engine.cache_snapshots import held_positions
from millpond.engine.outputs import Forgotten
from millpond.engine.request import MOST_SPANS
from millpond.engine.request_state import RequestState
from millpond.errors import OptionError


def check_spans(spans: Sequence[tuple[int, int]], n_tokens: int) -> None:
    """
    Raises:
        OptionError: too many spans, or one that ends before it begins or leaves a prompt of `n_tokens`.
    """
    if len(spans) > MOST_SPANS:
        raise OptionError(f"tell_forgotten has {len(spans)} spans: must be at most {MOST_SPANS}; join some of them")
    for begin, end in spans:
        if not 0 <= begin <= end <= n_tokens:
            raise OptionError(
                f"tell_forgotten: span [{begin}, {end}) must lie in the prompt, whose tokens are 0 to {n_tokens - 1}"
            )


def forgotten(
    layers: Sequence[LayerCache], timeline: PositionTracker, sequence: int, spans: Sequence[tuple[int, int]]
) -> tuple[Forgotten, ...]:
    """What one sequence has lost of spans of its tokens.

    A merged entry counts as the token at whose position it stays.

    Args:
        layers, timeline: of the caches that hold it.
    """
    holders, heads = _holders(layers, timeline, sequence)
    lost, rare = holders == 0, 2 * holders < heads
    return tuple(
        Forgotten(
            begin, end, _share(lost[begin:end]), _share(rare[begin:end]), _share(holders[begin:end]) / max(heads, 1)
        )
        if end > begin
        else Forgotten(begin, end, 0.0, 0.0, 1.0)
        for begin, end in spans
    )


def note_forgotten(live: RequestState) -> None:
    """Tell the answers of a request that end, and whose caches have read the prompt, what these have forgotten."""
    spans = live.request.tell_forgotten
    if not spans:
        return
    for answer in live.answers:
        if answer.finished and answer.kv is not None and not answer.forgotten and (found := live.cache(answer.index)):
            stack, sequence = found
            answer.forgotten = forgotten(stack.layers, stack.timeline, sequence, spans)


def _holders(layers: Sequence[LayerCache], timeline: PositionTracker, sequence: int) -> tuple[Tensor, int]:
    """(seen,) how many heads of all layers hold each token, and how many heads there are."""
    seen, heads = int(timeline.seen[sequence] + timeline.closed[sequence]), 0
    holders = torch.zeros(seen, dtype=torch.int32)
    for layer in layers:
        if layer.table is None:
            continue
        heads += layer.table.n_kv_heads
        for positions in held_positions(layer, sequence):
            found = positions[(positions >= 0) & (positions < seen)].long()
            holders.index_add_(0, found, torch.ones_like(found, dtype=torch.int32))
    return holders, heads


def _share(of: Tensor) -> float:
    return float(of.double().mean())
