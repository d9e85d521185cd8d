"""`millpond.fair_shares`: the share of the budget that each message of a chat, or spans of a prompt, keep."""

from __future__ import annotations

from collections.abc import Sequence

from millpond.cache.state.span_marks import MOST_SHARES, FairShare
from millpond.server.errors import ApiError
from millpond.server.message_spans import Span
from millpond.server.schemas import CacheFields

FAIR = "millpond.fair_shares"


def share_of_chat(fields: CacheFields) -> float | None:
    """The share of each message of a chat; None: they have none.

    Raises:
        ApiError: spans, which belong to a completion.
    """
    if isinstance(fields.fair_shares, list):
        raise _refused("spans go with the prompt of a completion; give one number, the share of each message")
    return fields.fair_shares


def spans_of_prompt(fields: CacheFields) -> list[tuple[int, int, float]]:
    """The spans of a completion's prompt, with their shares.

    Raises:
        ApiError: one share without spans.
    """
    if isinstance(fields.fair_shares, int | float):
        raise _refused("a completion has no messages; give [begin, end, share] of spans of its prompt")
    return fields.fair_shares or []


def refuse_fair_shares(fields: CacheFields, way_out: str) -> None:
    """
    Raises:
        ApiError: `millpond.fair_shares` is given.
    """
    if fields.fair_shares is not None:
        raise _refused(way_out)


def with_shares(spans: Sequence[Span], shares: Sequence[float]) -> tuple[FairShare, ...]:
    """Spans of tokens with their shares, ascending; a token of two spans is of the first, and empty spans are left out.

    Raises:
        ApiError: too many.
    """
    if len(spans) > MOST_SHARES:
        raise _refused(f"{len(spans)} messages are more than {MOST_SHARES}; leave out fair_shares, or some messages")
    found: list[FairShare] = []
    for (begin, end), share in sorted(zip(spans, shares, strict=True)):
        first = max(begin, found[-1][1]) if found else begin
        if first < end:
            found.append((first, end, float(share)))
    return tuple(found)


def _refused(why: str) -> ApiError:
    return ApiError(400, f"{FAIR}: {why}", "invalid_value", FAIR)
