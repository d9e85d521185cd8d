"""How much text fits into a number of tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.errors import OptionError
from millpond_lab.evals.data.generated_task import TokenBudget, largest_fitting
from millpond_lab.evals.data.haystack import Haystack, place
from tests.helpers.evals.task_help import count, gpt2, word_tokenizer


@given(st.lists(st.integers(0, 9), min_size=1, max_size=60), st.integers(-2, 200))
def test_the_largest_that_fits_is_found(steps: list[int], limit: int) -> None:
    sizes = [sum(steps[: n + 1]) for n in range(len(steps))]
    want = max((n for n, size in enumerate(sizes) if size <= limit), default=-1)
    assert largest_fitting(lambda n: sizes[n], limit, len(sizes) - 1) == want


def test_few_sizes_are_measured() -> None:
    asked = []

    def size(n: int) -> int:
        asked.append(n)
        return 40 + 13 * n // 10

    assert largest_fitting(size, 100_000) == 76893  # 13 * 76893 = 999609
    assert len(asked) < 8  # bisection: 17


def test_the_middle_is_cut_in_whole_words() -> None:
    text = " ".join(f"w{n}" for n in range(100))
    short = TokenBudget(word_tokenizer()).cut_middle(text, 11)
    assert short.split() == [f"w{n}" for n in (0, 1, 2, 3, 4, 5, 95, 96, 97, 98, 99)]
    assert TokenBudget(word_tokenizer()).cut_middle(text, 100) == text
    with pytest.raises(OptionError, match="raise max_tokens"):
        TokenBudget(word_tokenizer()).cut_middle(text, 0)


def test_the_longest_head_is_whole_words() -> None:
    text = "Unbelievable lighthouses, extraordinarily  tall."
    room = TokenBudget(gpt2())
    for limit in range(1, 12):
        head = text[: room.head(text, limit)]
        assert count(gpt2(), head) <= limit
        assert text.startswith(head)
        assert head == "" or text[len(head) : len(head) + 1] in ("", " ")


def test_needles_keep_order_and_depth() -> None:
    sentences = [f"{n:04d}" for n in range(100)]
    laid = place(sentences, [(1.0, "end!"), (0.0, "top!"), (0.5, "mid1"), (0.5, "mid2")])
    assert (laid[0], laid[-1]) == ("top!", "end!")
    assert laid.index("mid2") == laid.index("mid1") + 1
    assert abs(laid.index("mid1") - 51) <= 1
    assert [sentence for sentence in laid if sentence.isdigit()] == sentences
    assert place([], [(0.3, "alone")]) == ["alone"]


def test_hay_has_the_words_that_were_asked_for() -> None:
    hay = Haystack(iter(["one two three.", "four five.", "six."] * 9))
    for words in (7, 0, 1, 3, 4):
        assert len(hay.text(words).split()) == words
    assert hay.text(4) == "five. one two three."
