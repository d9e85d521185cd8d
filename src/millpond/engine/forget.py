"""Spans of a prompt that leave its cache once they were read, and the share of spans that a cache has lost."""

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
    """Of `n` tokens that are to be read of a prompt, those up to the end of the next span that leaves."""
    read = state.scheduled.num_computed_tokens
    return next((min(n, end - read) for _, end in state.marks.forget if end > read), n)


def drop_read(state: RequestState) -> None:
    """Let a span leave that was just read to its end.

    Raises:
        PoolFullError: see `BatchCache.drop_spans`.
    """
    ended = [span for span in state.marks.forget if span[1] == state.scheduled.num_computed_tokens]
    if ended and state.private_cache is not None:
        state.private_cache.drop_spans(0, ended)
        record_dropped(state)


def drop_restored(batch_cache: BatchCache, spans: Sequence[Span], forgotten: Sequence[Span], n_tokens: int) -> None:
    """Let spans leave the cache of an earlier turn of `n_tokens`, which had `forgotten` some of them already.

    Raises:
        PoolFullError: see `BatchCache.drop_spans`.
    """
    batch_cache.tracker.marks.dropped.add(forgotten, 0)
    known = set(forgotten)
    more = [(begin, min(end, n_tokens)) for begin, end in spans if begin < n_tokens]
    batch_cache.drop_spans(0, [span for span in more if span not in known])


def record_dropped(state: RequestState) -> None:
    """Tell the answers of a request how many tokens of its prompt have left its cache so far."""
    if state.marks.forget and state.private_cache is not None:
        dropped = state.private_cache.tracker.marks.dropped.count(0)
        for completion in state.completions:
            completion.reuse = completion.reuse._replace(forgotten_tokens=dropped, exact=False)


def forgotten(
    layers: Sequence[LayerCache], tracker: PositionTracker, sequence: int, spans: Sequence[tuple[int, int]]
) -> tuple[Forgotten, ...]:
    """What one sequence has lost of spans of its tokens.

    A merged entry counts as the token at whose position it stays.

    Args:
        layers, tracker: of the caches that hold it.
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
    """Tell the answers of a request that end, and whose caches have read the prompt, what these have forgotten."""
    spans = state.marks.report
    if not spans:
        return
    for completion in state.completions:
        if (
            completion.finished
            and completion.kv is not None
            and not completion.forgotten
            and (found := state.cache(completion.index))
        ):
            batch_cache, sequence = found
            completion.forgotten = forgotten(batch_cache.layers, batch_cache.tracker, sequence, spans)


def _holders(layers: Sequence[LayerCache], tracker: PositionTracker, sequence: int) -> tuple[Tensor, int]:
    """(seen,) how many heads of all layers hold each token, and how many heads there are."""
    seen, heads = int(tracker.seen[sequence] + tracker.closed[sequence]), 0
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
