"""Spans that are dropped from a cache with later text after them, and their checks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from millpond.errors import CacheMismatchError, OptionError
from millpond.hf.protocol import LayerCaches
from millpond.policy.policy import Policy
from millpond.prompt_marks import Span, ascending, check_apart, check_inside


def forget_refusal(policy: Policy) -> str | None:
    """Return why spans cannot be dropped from a cache of this policy, or None."""
    if policy.merge is not None:
        return "this method merges entries, and a merged one stands for tokens inside and outside the span"
    if policy.positions == "cache_relative":
        return (
            "this method counts positions by what the cache holds, so that later text would move; give "
            "positions='absolute'"
        )
    if policy.needs.block_lookup is not None:
        return "this method finds entries by summaries of blocks, which hold the span too"
    return None


def drop_spans(cache: LayerCaches, spans: Sequence[Span], sequence: int | None) -> None:
    """Drop spans of a sequence, or of all, from every layer; see `MillpondCache.forget`.

    Raises:
        OptionError: see `MillpondCache.forget`.
        CacheMismatchError: the plan of a prompt is still to come.
        PoolFullError: no room for copies of pages that forks hold.
    """
    sequences = list(range(cache.tracker.n_seq)) if sequence is None else [sequence]
    dropped = _spans_in(sequences, cache.tracker.seen, spans)
    _check_forgets(cache)
    _check_not_kept(cache, sequences, dropped)
    cache.draft_rollback.commit()
    cache.draft_rollback.truncatable = False
    for layer_cache in cache.layer_caches:
        for number in sequences:
            layer_cache.drop_spans(number, dropped)
    for number in sequences:
        cache.tracker.marks.dropped.add(dropped, number)


def _check_forgets(cache: LayerCaches) -> None:
    """Check that spans can be dropped from a cache.

    Raises:
        OptionError: the method or the model holds more of a token than entries, so that dropping these is not enough.
        CacheMismatchError: the plan of a prompt is still to come.
    """
    if cache.states.layers:
        raise OptionError(
            "forget(): this model's recurrent states hold the whole text, and a span cannot be taken out of them; read "
            "the text again without it"
        )
    for layer_cache in cache.layer_caches:
        reason = forget_refusal(layer_cache.policy)
        if reason is not None:
            raise OptionError(f"forget(): {reason}; or read the text again without the span")
        if layer_cache.pending:
            raise CacheMismatchError(
                f"forget(): layer {layer_cache.index} has a prompt whose plan is still to come; "
                "call it after the prompt"
            )


def _check_not_kept(cache: LayerCaches, sequences: Sequence[int], spans: Sequence[Span]) -> None:
    """Check that no span to drop is kept by `protect`.

    Raises:
        OptionError: a span holds tokens that `protect` keeps.
    """
    for sequence in sequences:
        check_apart(spans, cache.tracker.marks.kept.of(sequence), "protect() keeps")


def forgotten_spans(spans: Sequence[Sequence[int]], max_tokens: int, text: str) -> tuple[Span, ...]:
    """Return spans in ascending order, checked.

    Args:
        spans: Pairs (begin, end).
        max_tokens: Tokens of the text that they must be in.
        text: Name of the text, in words.

    Raises:
        OptionError: none; something else than pairs of whole numbers; a span that is empty or leaves the text; or spans
            that overlap.

    Example:
        >>> forgotten_spans([(8, 12), (0, 4)], 20, "the text")
        ((0, 4), (8, 12))
    """
    in_order = ascending(spans, "forget")
    check_inside(in_order, max_tokens, text)
    return tuple(in_order)


def _spans_in(sequences: Sequence[int], seen: np.ndarray, spans: Sequence[Span]) -> tuple[Span, ...]:
    """Return the spans to drop from some sequences, checked, see `forgotten_spans`.

    Raises:
        OptionError: see `forgotten_spans`; or there is no such sequence, or no span.
    """
    if not len(seen):
        raise OptionError("forget(): the cache has read nothing")
    if not spans:
        raise OptionError("forget(): no span; give (begin, end)")
    for sequence in sequences:
        if not 0 <= sequence < len(seen):
            raise OptionError(f"forget(): sequence {sequence}; the cache holds {len(seen)}")
    return forgotten_spans(spans, min(int(seen[s]) for s in sequences), "the text that was read")
