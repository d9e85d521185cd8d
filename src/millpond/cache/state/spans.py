"""Spans [begin, end) of positions of a text: what is given by callers and files, and sets of positions."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from millpond.errors import DataError, OptionError

#: [begin, end) in positions of a text.
Span = tuple[int, int]


def ascending(spans: Sequence[Sequence[int]], name: str) -> list[Span]:
    """Spans as a caller gives them, ascending.

    Args:
        name: what a message calls them.

    Raises:
        OptionError: something else than pairs of whole numbers, or spans that overlap. Where they lie is not checked.
    """
    given: object = spans
    if isinstance(given, str | bytes) or not isinstance(given, Sequence):
        raise OptionError(f"{name}={str(spans)[:80]!r}: give a list of spans (begin, end)")
    found: list[Span] = []
    for span in spans:
        one: object = span
        pair = isinstance(one, Sequence) and not isinstance(one, str | bytes) and len(span) == 2
        whole = pair and all(isinstance(n, int) and not isinstance(n, bool) for n in span)
        if not whole:
            raise OptionError(f"{name}: {str(span)[:80]} is no span: give (begin, end), two whole numbers")
        found.append((int(span[0]), int(span[1])))
    found.sort()
    for (first, last), (begin, end) in pairwise(span for span in found if span[0] < span[1]):
        if begin < last:
            raise OptionError(f"{name}: [{begin}, {end}) overlaps [{first}, {last}); give each token once")
    return found


def spans_of_tensor(stored: Tensor, n_tokens: int) -> tuple[Span, ...]:
    """Spans of a text of `n_tokens` out of a file.

    Raises:
        DataError: they are no pairs of whole numbers, hold nothing, overlap, or leave the text.
    """
    if stored.dtype not in (torch.int32, torch.int64) or stored.ndim != 2 or stored.shape[1] != 2:
        raise DataError("spans in a file must be pairs of whole numbers; the file is read as missing")
    if not 0 < len(stored) <= n_tokens:
        raise DataError(f"a file has {len(stored)} spans of {n_tokens} tokens; it is read as missing")
    spans = tuple((int(begin), int(end)) for begin, end in stored.tolist())
    places = [place for span in spans for place in span]
    if not all(a < b for a, b in spans) or places != sorted(places) or not 0 <= places[0] <= places[-1] <= n_tokens:
        raise DataError("spans in a file do not lie in its text; it is read as missing")
    return spans


def tokens_in(spans: Sequence[Span], first: int = 0) -> int:
    """Positions of disjoint spans, those before `first` left out."""
    return sum(max(end - max(begin, first), 0) for begin, end in spans)


def united(spans: Sequence[Span]) -> tuple[Span, ...]:
    """Spans ascending, without those that are empty, and those that touch or overlap as one.

    Example:
        >>> united([(8, 12), (0, 4), (3, 6), (6, 7), (9, 9)])
        ((0, 7), (8, 12))
    """
    found: list[Span] = []
    for begin, end in sorted(span for span in spans if span[0] < span[1]):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return tuple(found)


def covers(spans: Sequence[Span], others: Sequence[Span]) -> bool:
    """Whether all positions of `others` lie in `spans`."""
    return united([*spans, *others]) == united(spans)
