"""What `PromptMarks` accepts, how it orders it, and where its spans of characters lie among tokens."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import millpond as mp
from millpond.errors import OptionError
from millpond.kernels.decode_rules import MOST_LEAST
from millpond.policy.fair_shares import BEHIND
from millpond.prompt_marks import MAX_SHARES, PromptMarks, Span, TokenOffsets, with_share


def test_marks_are_ascending_and_those_that_stay_are_joined() -> None:
    marks = mp.PromptMarks(
        keep=((8, 12), (0, 4), (4, 6), (7, 7)),
        shares=((20, 24, 1), (14, 18, 0.5), (19, 19, 1.0)),
        forget=((30, 33), (26, 28)),
        report=((9, 12), (0, 0), (3, 10)),
        breakpoints=(12, 6, 12),
    )
    assert marks.keep == ((0, 6), (8, 12))
    assert marks.shares == ((14, 18, 0.5), (20, 24, 1.0))
    assert marks.forget == ((26, 28), (30, 33))
    assert marks.report == ((9, 12), (0, 0), (3, 10)), "an output has one for each, in this order"
    assert marks.breakpoints == (6, 12)
    assert marks == PromptMarks(**{name: list(getattr(marks, name)) for name in PromptMarks.__slots__})
    assert marks
    assert not PromptMarks(keep=((3, 3),))


@pytest.mark.parametrize(
    ("marks", "rule"),
    [
        ({"keep": 5}, "keep='5': give a list of spans"),
        ({"keep": "04"}, "give a list of spans"),
        ({"keep": ((0, 4.0),)}, "two whole numbers"),
        ({"keep": ((0, True),)}, "two whole numbers"),
        ({"keep": ((4, 3),)}, "keep: .* is no span"),
        ({"keep": ((0, 2**31),)}, "keep: .* is no span"),
        ({"keep": ((0, 4), (3, 5))}, "overlaps"),
        ({"keep": tuple((2 * n, 2 * n + 1) for n in range(65))}, "65 spans that do not touch are more than 64"),
        ({"shares": 0.5}, "list of .begin, end, share"),
        ({"shares": ((0, 4),)}, "begin, end, share"),
        ({"shares": ((0, 4, float("nan")),)}, "above 0 and up to 1"),
        ({"shares": ((0, 4, 1), (0, 4, 1))}, "twice"),
        ({"shares": tuple((n, n + 1, 1) for n in range(257))}, "257 spans are more than 256"),
        ({"forget": ((5, 5),)}, "one token at least"),
        ({"forget": ((3, 9), (8, 12))}, "overlaps"),
        ({"forget": tuple((n, n + 1) for n in range(1025))}, "at most 1024"),
        ({"forget": ((2, 6),), "keep": ((4, 8),)}, r"\[2, 6\) holds tokens of \[4, 8\), which keep= keeps"),
        ({"report": ((5, 4),)}, "report: .* is no span"),
        ({"report": ((0, 1),) * 4097}, "report has 4097 spans: must be at most 4096"),
        ({"breakpoints": 3}, "list of numbers"),
        ({"breakpoints": (0,)}, "breakpoint 0 must be a number of tokens, from 1 on"),
        ({"breakpoints": (2.0,)}, "breakpoint 2.0"),
        ({"breakpoints": (1, 2, 3, 4, 5)}, "5 breakpoints: must be at most 4"),
    ],
)
def test_what_is_no_mark_is_refused(marks: Any, rule: str) -> None:
    with pytest.raises(OptionError, match=rule):
        PromptMarks(**marks)


@pytest.mark.parametrize(
    ("marks", "rule"),
    [
        ({"keep": ((0, 9),)}, r"keep: span \[0, 9\) must lie in the prompt, whose tokens are 0 to 7"),
        ({"shares": ((0, 4, 1), (7, 9, 1))}, r"shares: span \[7, 9\)"),
        ({"forget": ((7, 8),)}, "without its last token"),
        ({"forget": ((-1, 4),)}, "tokens 0 to 6"),
        ({"report": ((0, 1), (3, 9))}, r"report: span \[3, 9\)"),
        ({"breakpoints": (9,)}, "from 1 to the prompt's 8"),
    ],
)
def test_marks_lie_in_their_prompt(marks: Any, rule: str) -> None:
    with pytest.raises(OptionError, match=rule):
        PromptMarks(**marks).in_prompt(8)


def test_marks_up_to_the_ends_of_a_prompt_lie_in_it() -> None:
    PromptMarks(keep=((7, 8),), shares=((0, 8, 1),), forget=((0, 7),), report=((8, 8),), breakpoints=(8,)).in_prompt(8)


def test_tokens_of_characters() -> None:
    offsets = [(0, 0), (0, 4), (4, 5), (5, 11), (12, 15), (0, 0)]  # a special token at each end, and a space left out
    marks = PromptMarks(
        keep=((0, 2), (4, 5)),
        shares=((5, 7, 0.5), (8, 14, 1)),
        forget=((12, 14),),
        report=((3, 6), (11, 12), (0, 15)),
        breakpoints=(4, 8, 15),
    ).in_tokens(offsets)
    assert marks.keep == ((1, 3),), "what touches in tokens is one"
    assert marks.shares == ((3, 4, 0.5), (4, 5, 1.0)), "a token of two spans is of the first"
    assert marks.forget == ((4, 5),)
    assert marks.report == ((1, 4), (0, 0), (1, 5)), "a span without a token stays in its place"
    assert marks.breakpoints == (2, 3, 6), "a token that a place divides lies behind it"


@st.composite
def texts(draw: st.DrawFn) -> tuple[list[Span], Span]:
    """Tokens one behind another, and a span of the text."""
    ends = [0, *sorted(draw(st.sets(st.integers(1, 40), min_size=1, max_size=12)))]
    begin = draw(st.integers(0, ends[-1]))
    return list(pairwise(ends)), (begin, draw(st.integers(begin, ends[-1])))


@given(texts())
def test_the_tokens_of_a_span_are_those_that_share_characters_with_it(text: tuple[list[Span], Span]) -> None:
    offsets, (begin, end) = text
    inside = [n for n, (b, e) in enumerate(offsets) if set(range(b, e)) & set(range(begin, end))]
    first, last = TokenOffsets(offsets).span((begin, end))
    assert list(range(first, last)) == inside
    assert TokenOffsets(offsets).before(begin) == sum(e <= begin for _, e in offsets)


def test_limits_are_those_of_the_kernels_and_the_policy() -> None:
    assert MAX_SHARES == MOST_LEAST
    with pytest.raises(OptionError, match="is no span"):
        with_share([(0, BEHIND)], 1)
