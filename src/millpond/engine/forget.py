"""Spans of a prompt that are dropped once they were read, and the share of spans that a cache has lost."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from millpond.cache.batch_cache import BatchCache
from millpond.cache.layer.layer_cache import LayerCache
from millpond.cache.state.positions import PositionTracker
from millpond.engine.cache_snapshots import held_positions
from millpond.engine.outputs import Forgotten
from millpond.engine.request_state import RequestState
from millpond.prompt_marks import Span


def until_forgotten(state: RequestState, n: int) -> int:
    """Return how many of the next `n` tokens of a prompt come up to the next span to drop.

    The span is included.
    """
    read = state.scheduled.num_computed_tokens
    return next((min(n, end - read) for _, end in state.marks.forget if end > read), n)


def drop_read(state: RequestState) -> None:
    """Drop a span that was just read to its end.

    Raises:
        PoolFullError: see `BatchCache.drop_spans`.
    """
    ended = [span for span in state.marks.forget if span[1] == state.scheduled.num_computed_tokens]
    if ended and state.private_cache is not None:
        state.private_cache.drop_spans(0, ended)
        record_dropped(state)


def drop_restored(batch_cache: BatchCache, spans: Sequence[Span], forgotten: Sequence[Span], n_tokens: int) -> None:
    """Drop spans from the cache of an earlier turn.

    Args:
        batch_cache: The restored cache.
        spans: Spans to drop.
        forgotten: Spans that the earlier turn had dropped already.
        n_tokens: Tokens of the earlier turn.

    Raises:
        PoolFullError: see `BatchCache.drop_spans`.
    """
    batch_cache.tracker.marks.dropped.add(forgotten, 0)
    already_dropped = set(forgotten)
    restored_spans = [(begin, min(end, n_tokens)) for begin, end in spans if begin < n_tokens]
    batch_cache.drop_spans(0, [span for span in restored_spans if span not in already_dropped])


def record_dropped(state: RequestState) -> None:
    """Record in the answers of a request how many tokens of its prompt have been dropped."""
    if state.marks.forget and state.private_cache is not None:
        dropped = state.private_cache.tracker.marks.dropped.count(0)
        for completion in state.completions:
            completion.reuse = completion.reuse._replace(forgotten_tokens=dropped, exact=False)


def forgotten(
    layers: Sequence[LayerCache], tracker: PositionTracker, sequence: int, spans: Sequence[tuple[int, int]]
) -> tuple[Forgotten, ...]:
    """Return what one sequence has lost of spans of its tokens.

    A merged entry counts as the token at whose position it stays.

    Args:
        layers: Layer caches that hold it.
        tracker: Positions in these caches.
        sequence: Index of the sequence.
        spans: Spans of its tokens.
    """
    holders, heads = _holders(layers, tracker, sequence)
    lost, rare = holders == 0, 2 * holders < heads
    return tuple(
        Forgotten(
            begin, end, _share(lost[begin:end]), _share(rare[begin:end]), _share(holders[begin:end]) / max(heads, 1)
        )
        if end > begin
        else Forgotten(begin, end, 0.0, 0.0, 1.0)
        for begin, end in spans
    )


def record_forgotten(state: RequestState) -> None:
    """Record in finished answers what their caches have lost of the prompt they have read."""
    spans = state.marks.report
    if not spans:
        return
    for completion in state.completions:
        if (
            completion.finished
            and completion.kv is not None
            and not completion.forgotten
            and (holder := state.cache(completion.index))
        ):
            batch_cache, sequence = holder
            completion.forgotten = forgotten(batch_cache.layers, batch_cache.tracker, sequence, spans)


def _holders(layers: Sequence[LayerCache], tracker: PositionTracker, sequence: int) -> tuple[Tensor, int]:
    """Return how many heads of all layers hold each token, (seen,), and the number of heads."""
    seen, heads = int(tracker.seen[sequence] + tracker.closed[sequence]), 0
    holders = torch.zeros(seen, dtype=torch.int32)
    for layer in layers:
        if layer.table is None:
            continue
        heads += layer.table.n_kv_heads
        for positions in held_positions(layer, sequence):
            held = positions[(positions >= 0) & (positions < seen)].long()
            holders.index_add_(0, held, torch.ones_like(held, dtype=torch.int32))
    return holders, heads


def _share(of: Tensor) -> float:
    return float(of.double().mean())
