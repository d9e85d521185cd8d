"""Marks of a prompt: spans that are kept, shared out, forgotten or reported on, and places where others continue."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from millpond.errors import OptionError

#: [begin, end) in positions of a text.
Span = tuple[int, int]
#: [begin, end) in positions of a text, and its share of the budget, above 0 and at most 1.
SpanShare = tuple[int, int, float]

#: Most kept spans of one text that do not touch: each decoding step compares every entry with every span.
MAX_KEPT = 64
#: Most spans of one text with a share of the budget.
MAX_SHARES = 256
#: Most spans that leave one text.
MAX_FORGOTTEN = 1024
#: Most spans that an output reports on.
MAX_REPORTED = 4096
#: Most breakpoints of one prompt.
MAX_BREAKPOINTS = 4
#: A position is an int32, and the largest of them stands behind every text.
_BEHIND = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptMarks:
    """Spans of one prompt with a treatment of their own.

    They are in tokens, [begin, end), in any order.

    Attributes:
        keep: spans that every head of every layer keeps, whatever the method; they count in the budget. At most 64
            that do not touch, which are joined.
        shares: (begin, end, share) of spans, such as the messages of a chat, of which every head of every layer keeps
            at least that share of an even cut of its budget. At most 256.
        forget: spans before the last token that no later token sees: they leave the cache of the turn that the prompt
            continues before more is read, and are else read and leave before the next token is. Later tokens of a
            stored turn have seen them. Such a prompt shares no pages with others. At most 1,024.
        report: spans of which each answer tells in the end how much is not held any more, in their order here, see
            `Completion.forgotten`. At most 4,096.
        breakpoints: with `prefix_cache`, numbers of tokens behind which other prompts may go on: methods that sum over
            all queries keep their sums there, at the last end of a block before. Other methods share every block and
            need none; where nothing is shared they change nothing. At most 4.

    Raises:
        OptionError: something else than such spans, too many of them, or some that overlap and must not.

    Example:
        >>> PromptMarks(keep=((8, 12), (0, 4), (4, 6))).keep
        ((0, 6), (8, 12))
    """

    keep: tuple[Span, ...] = ()
    shares: tuple[SpanShare, ...] = ()
    forget: tuple[Span, ...] = ()
    report: tuple[Span, ...] = ()
    breakpoints: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        checked: dict[str, tuple[Any, ...]] = {
            "keep": kept_spans(self.keep, "keep"),
            "shares": shares_in_order(self.shares, "shares"),
            "forget": _forgotten(self.forget),
            "report": _reported(self.report),
            "breakpoints": _places(self.breakpoints),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        check_apart(self.forget, self.keep, "keep= keeps")

    def __bool__(self) -> bool:
        """Whether anything is marked."""
        return any((self.keep, self.shares, self.forget, self.report, self.breakpoints))

    def in_prompt(self, n_tokens: int) -> None:
        """Check that all marks are in a prompt of `n_tokens`.

        Spans to forget must end before its last token.

        Raises:
            OptionError: one does not; the message names it.
        """
        last = f"whose tokens are 0 to {n_tokens - 1}"
        for name, spans in (("keep", self.keep), ("shares", self.shares), ("report", self.report)):
            for begin, end, *_ in spans:
                if not 0 <= begin <= end <= n_tokens:
                    raise OptionError(f"{name}: span [{begin}, {end}) must lie in the prompt, {last}")
        check_inside(self.forget, n_tokens - 1, "the prompt without its last token, which the answer continues")
        for place in self.breakpoints:
            if place > n_tokens:
                raise OptionError(
                    f"breakpoint {place} must be a number of tokens from 1 to the prompt's {n_tokens}; leave it out, "
                    "or give a place in the prompt"
                )

    def in_tokens(self, offsets: Sequence[Span] | TokenOffsets) -> PromptMarks:
        """Return these marks, in characters of a text, as marks of its tokens.

        A token that shares a character with a span belongs to it; of two spans with shares, to the first. A token
        that a breakpoint divides is after it.

        Args:
            offsets: [begin, end) of each token, in characters of the text: `offset_mapping` of a tokenizer.

        Raises:
            OptionError: spans that are apart in characters, and not in tokens.

        Example:
            >>> PromptMarks(keep=((0, 5),)).in_tokens([(0, 3), (3, 7), (7, 9)]).keep
            ((0, 2),)
        """
        at = offsets if isinstance(offsets, TokenOffsets) else TokenOffsets(offsets)
        return PromptMarks(
            keep=united([at.span(span) for span in self.keep]),
            shares=disjoint([(*at.span((begin, end)), share) for begin, end, share in self.shares]),
            forget=united([at.span(span) for span in self.forget]),
            report=tuple(at.span(span) for span in self.report),
            breakpoints=tuple(place for place in map(at.before, self.breakpoints) if place),
        )


class TokenOffsets:
    """Where the characters of a text lie among its tokens.

    Args:
        offsets: [begin, end) of each token, in characters of the text.
    """

    def __init__(self, offsets: Sequence[Span]) -> None:
        pairs = np.array(offsets, dtype=np.int64).reshape(-1, 2)
        self._begin, self._end = pairs[:, 0], pairs[:, 1]

    def span(self, span: Span) -> Span:
        """Return [first, last + 1) of the tokens that share characters with a span, or (0, 0)."""
        begin, end = span
        inside = np.flatnonzero((self._begin < np.minimum(self._end, end)) & (self._end > begin))
        return (int(inside[0]), int(inside[-1]) + 1) if len(inside) and begin < end else (0, 0)

    def before(self, place: int) -> int:
        """Return how many tokens end at or before a character."""
        behind = np.flatnonzero(self._end > place)
        return int(behind[0]) if len(behind) else len(self._end)


# -------------------------------------------------------------------------------------------------- checks of spans


def ascending(spans: Sequence[Sequence[int]], name: str) -> list[Span]:
    """Return a caller's spans in ascending order.

    Args:
        spans: [begin, end) of each, in any order; whether they are inside a text is not checked.
        name: What a message calls them.

    Raises:
        OptionError: Something else than pairs of whole numbers, or spans that overlap.
    """
    in_order = sorted(pairs(spans, name))
    for (first, last), (begin, end) in pairwise(span for span in in_order if span[0] < span[1]):
        if begin < last:
            raise OptionError(f"{name}: [{begin}, {end}) overlaps [{first}, {last}); give each token once")
    return in_order


def pairs(spans: Sequence[Sequence[int]], name: str) -> list[Span]:
    """Return a caller's spans in their order; see `ascending`.

    Raises:
        OptionError: something else than pairs of whole numbers.
    """
    given: object = spans
    if isinstance(given, str | bytes) or not isinstance(given, Sequence):
        raise OptionError(f"{name}={str(spans)[:80]!r}: give a list of spans (begin, end)")
    checked: list[Span] = []
    for span in spans:
        one: object = span
        pair = isinstance(one, Sequence) and not isinstance(one, str | bytes) and len(span) == 2
        if not pair or not all(map(_is_whole, span)):
            raise OptionError(f"{name}: {str(span)[:80]} is no span: give (begin, end), two whole numbers")
        checked.append((int(span[0]), int(span[1])))
    return checked


def kept_spans(spans: Sequence[Sequence[int]], name: str = "spans") -> tuple[Span, ...]:
    """Return spans to keep: ascending, joined where they touch, without empty ones.

    Args:
        spans: [begin, end) of each, in any order.
        name: What a message calls them.

    Raises:
        OptionError: something else than pairs of whole numbers, a span that ends before it begins, spans that
            overlap, or more than `MAX_KEPT` that do not touch.

    Example:
        >>> kept_spans([(8, 12), (0, 4), (4, 6)])
        ((0, 6), (8, 12))
    """
    given = ascending(spans, name)
    _check_ends(given, name)
    joined = united(given)
    if len(joined) > MAX_KEPT:
        raise OptionError(f"{name}: {len(joined)} spans that do not touch are more than {MAX_KEPT}; join some of them")
    return joined


def shares_in_order(shares: Iterable[Sequence[float]], name: str) -> tuple[SpanShare, ...]:
    """Return spans with shares of the budget: ascending, without empty ones.

    Args:
        shares: (begin, end, share) of each, in any order.
        name: What a message calls them.

    Raises:
        OptionError: something else than two whole numbers and a share, a span that ends before it begins, spans that
            overlap, or more than `MAX_SHARES`.
    """
    every: object = shares
    if isinstance(every, str | bytes) or not isinstance(every, Iterable):
        raise OptionError(f"{name}={str(shares)[:80]!r}: give a list of (begin, end, share)")
    by_span: dict[Span, float] = {}
    for one in shares:
        given: object = one
        if not isinstance(given, Sequence) or isinstance(given, str | bytes) or len(one) != 3:
            raise OptionError(f"{name}: {str(one)[:80]} is not a span with a share: give (begin, end, share)")
        (span,) = pairs([one[:2]], name)  # type: ignore[list-item]
        _check_ends([span], name)
        share = checked_share(one[2], f"{name}: share of [{span[0]}, {span[1]})")
        if span[0] < span[1]:
            if span in by_span:
                raise OptionError(f"{name}: [{span[0]}, {span[1]}) is there twice; give each token once")
            by_span[span] = share
    if len(by_span) > MAX_SHARES:
        raise OptionError(f"{name}: {len(by_span)} spans are more than {MAX_SHARES}; join some of them")
    return tuple((begin, end, by_span[begin, end]) for begin, end in ascending(list(by_span), name))


def with_share(spans: Sequence[Sequence[int]], share: object, name: str = "spans") -> tuple[SpanShare, ...]:
    """Return spans that all have one share; see `shares_in_order`.

    Raises:
        OptionError: see `shares_in_order`.

    Example:
        >>> with_share([(8, 12), (0, 4), (4, 4)], 0.5)
        ((0, 4, 0.5), (8, 12, 0.5))
    """
    checked = checked_share(share)
    return shares_in_order([(begin, end, checked) for begin, end in ascending(spans, name)], name)


def checked_share(share: object, name: str = "share") -> float:
    """Return a share as a number.

    Args:
        share: A number above 0 and up to 1.
        name: What a message calls it.

    Raises:
        OptionError: It is not such a number.
    """
    number = isinstance(share, int | float) and not isinstance(share, bool)
    if not number or not math.isfinite(share) or not 0 < share <= 1:  # type: ignore[arg-type, operator]
        raise OptionError(f"{name}={str(share)[:80]} must be a number above 0 and up to 1; leave it out for no share")
    return float(share)  # type: ignore[arg-type]


def check_inside(spans: Sequence[Span], n_tokens: int, text: str) -> None:
    """Check that spans to be forgotten hold tokens of a text.

    Args:
        spans: [begin, end) of each.
        n_tokens: Length of the text.
        text: What the message calls the text.

    Raises:
        OptionError: A span is empty, or leaves the text.
    """
    for begin, end in spans:
        if not 0 <= begin < end <= n_tokens:
            raise OptionError(
                f"forget: [{begin}, {end}) must hold one token at least, and lie in {text}, tokens 0 to {n_tokens - 1}"
            )


def check_apart(spans: Sequence[Span], kept: Sequence[Span], who: str) -> None:
    """Check that spans to be forgotten share no token with spans to keep.

    Args:
        spans: To be forgotten, [begin, end) of each.
        kept: To be kept.
        who: What keeps them, for the message.

    Raises:
        OptionError: Two of them share tokens.
    """
    for begin, end in spans:
        for first, last in kept:
            if begin < last and first < end:
                raise OptionError(
                    f"forget: [{begin}, {end}) holds tokens of [{first}, {last}), which {who}; leave one of the two out"
                )


def _forgotten(spans: Sequence[Span]) -> tuple[Span, ...]:
    in_order = ascending(spans, "forget")
    if len(in_order) > MAX_FORGOTTEN:
        raise OptionError(f"forget has {len(in_order)} spans: must be at most {MAX_FORGOTTEN}; join some of them")
    for begin, end in in_order:
        if begin >= end:
            raise OptionError(f"forget: [{begin}, {end}) must hold one token at least; leave it out")
    return tuple(in_order)


def _reported(spans: Sequence[Span]) -> tuple[Span, ...]:
    checked = pairs(spans, "report")
    if len(checked) > MAX_REPORTED:
        raise OptionError(f"report has {len(checked)} spans: must be at most {MAX_REPORTED}; join some of them")
    _check_ends(checked, "report")
    return tuple(checked)


def _places(places: Sequence[int]) -> tuple[int, ...]:
    given: object = places
    if isinstance(given, str | bytes) or not isinstance(given, Sequence):
        raise OptionError(f"breakpoints={str(places)[:80]!r}: give a list of numbers of tokens")
    for place in places:
        if not _is_whole(place) or place < 1:
            raise OptionError(f"breakpoint {str(place)[:80]} must be a number of tokens, from 1 on; leave it out")
    if len(places) > MAX_BREAKPOINTS:
        raise OptionError(
            f"{len(places)} breakpoints: must be at most {MAX_BREAKPOINTS}; leave out those that are met least"
        )
    return tuple(sorted({int(place) for place in places}))


def _check_ends(spans: Sequence[Span], name: str) -> None:
    for begin, end in spans:
        if not 0 <= begin <= end < _BEHIND:
            raise OptionError(f"{name}: {(begin, end)} is no span: give (begin, end) with 0 <= begin <= end")


def _is_whole(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool)


# -------------------------------------------------------------------------------------------------- sets of positions


def tokens_in(spans: Sequence[Span], first: int = 0) -> int:
    """Positions of disjoint spans, those before `first` left out."""
    return sum(max(end - max(begin, first), 0) for begin, end in spans)


def united(spans: Sequence[Span]) -> tuple[Span, ...]:
    """Spans ascending, without those that are empty, and those that touch or overlap as one.

    Example:
        >>> united([(8, 12), (0, 4), (3, 6), (6, 7), (9, 9)])
        ((0, 7), (8, 12))
    """
    joined: list[Span] = []
    for begin, end in sorted(span for span in spans if span[0] < span[1]):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((begin, end))
    return tuple(joined)


def covers(spans: Sequence[Span], others: Sequence[Span]) -> bool:
    """Whether all positions of `others` lie in `spans`."""
    return united([*spans, *others]) == united(spans)


def disjoint(shares: Sequence[SpanShare]) -> tuple[SpanShare, ...]:
    """Return spans with shares, ascending and disjoint.

    A position of two spans belongs to the first, and empty spans are left out.

    Example:
        >>> disjoint([(2, 6, 0.5), (0, 3, 0.25), (4, 4, 1.0)])
        ((0, 3, 0.25), (3, 6, 0.5))
    """
    apart: list[SpanShare] = []
    for begin, end, share in sorted(shares):
        first = max(begin, apart[-1][1]) if apart else begin
        if first < end:
            apart.append((first, end, share))
    return tuple(apart)
