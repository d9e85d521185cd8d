"""Spans of a text that a cache keeps, or that keep a share of its budget: see `MillpondCache.protect`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from millpond.cache.state.positions import PositionTracker
from millpond.cache.state.span_marks import fair_refusal, kept_refusal
from millpond.cache.state.spans import TextMarks
from millpond.codec.spec import Codec
from millpond.errors import CacheMismatchError, OptionError
from millpond.policy.policy import Policy
from millpond.prompt_marks import Span, SpanShare, kept_spans, with_share

AnySpan = TypeVar("AnySpan", Span, SpanShare)


def protect_spans(
    tracker: PositionTracker,
    policy: Policy,
    codecs: Sequence[Codec],
    spans: Sequence[Sequence[int]],
    share: float | None,
    sequence: int | None,
) -> None:
    """Mark spans of a text as kept, or as keeping a share of the budget.

    Args:
        tracker: Positions and marks of the cache's sequences.
        policy: Method of the cache.
        codecs: Number formats of the layers, each once.
        spans: [begin, end) in tokens of the sequence's own text, without pads.
        share: Share of an even cut of the budget; None: the spans are kept whole.
        sequence: The sequence of the batch that the spans are for; None: all.

    Raises:
        OptionError: The method cannot keep them, or they are no spans or no share.
        CacheMismatchError: No such sequence, or a span of tokens that were read already.
    """
    if share is None:
        refusal = kept_refusal(policy, codecs)
        if refusal is not None:
            raise OptionError(f"spans cannot be kept: {refusal}")
        _mark(tracker, tracker.marks.kept, kept_spans(spans), sequence)
        return
    shares = with_share(spans, share)
    refusal = fair_refusal(policy, codecs)
    if refusal is not None:
        raise OptionError(f"spans cannot have a share of the budget: {refusal}")
    _mark(tracker, tracker.marks.shares, shares, sequence)


def _mark(tracker: PositionTracker, marks: TextMarks[AnySpan], spans: Sequence[AnySpan], sequence: int | None) -> None:
    """Add spans to those of the next prompt, or of later text.

    Their tuples begin with their bounds.
    """
    if not tracker.n_seq:
        marks.expect(spans, sequence)
        return
    if sequence is not None and not 0 <= sequence < tracker.n_seq:
        raise CacheMismatchError(f"sequence {sequence}: the cache holds {tracker.n_seq}")
    sequences = range(tracker.n_seq) if sequence is None else [sequence]
    for s in sequences:
        if spans and spans[0][0] < tracker.seen[s]:
            raise CacheMismatchError(
                f"span [{spans[0][0]}, {spans[0][1]}): sequence {s} has read {tracker.seen[s]} tokens, of which "
                "some may have left; keep spans of what is read next, or protect() before the prompt"
            )
    for s in sequences:
        marks.add(spans, s)
