"""Metrics, worked by hand; ROUGE also against values of the library rouge-score 0.1.2."""

from __future__ import annotations

import doctest
import importlib
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.errors import OptionError
from millpond_lab.evals import metrics as m
from millpond_lab.evals.metrics import common_length, normal, units, units_zh


@pytest.mark.parametrize("name", ["millpond_lab.evals.metrics", "millpond_lab.evals.data.generated_task"])
def test_the_examples_in_docstrings_hold(name: str) -> None:
    outcome = doctest.testmod(importlib.import_module(name))
    assert outcome.failed == 0


def slow_common(left: str, right: str) -> int:
    row = [0] * (len(right) + 1)
    for a in left:
        last = row[:]
        for j, b in enumerate(right):
            row[j + 1] = last[j] + 1 if a == b else max(last[j + 1], row[j])
    return row[-1]


@given(st.text("abc", max_size=30), st.text("abc", max_size=30))
def test_the_common_subsequence_is_the_longest(left: str, right: str) -> None:
    assert common_length(left, right) == slow_common(left, right) == common_length(right, left)


def test_found() -> None:
    assert m.found(["alpha", "beta", "gamma", "delta"], "Gamma, then ALPHA.") == 0.5
    assert m.found(["pear"], "pearl") == m.found(["12"], "1234 and 012") == 0.0
    assert m.found(["a-b", "x"], "a-b (x)") == 1.0
    assert m.found_any(["no", "Anna"], "anna did") == 1.0
    assert m.found_any(["no"], "north") == 0.0


def test_in_order() -> None:
    assert m.in_order(["a b c d"], "x a c b d") == 0.75
    assert m.in_order(["a", "b"], "A b") == 1.0
    assert m.in_order(["a b"], "") == 0.0


def test_exact_and_f1() -> None:
    assert m.exact(["The  Mill!"], "mill") == 1.0
    assert m.exact(["mill"], "windmill") == 0.0
    # "old mill by river" and "old river": precision 1, recall 1/2
    assert m.f1(["the old mill by a river"], "Old river.") == pytest.approx(2 / 3)
    assert m.f1(["nothing", "old river"], "old river") == 1.0
    assert m.f1(["mill mill"], "mill") == pytest.approx(2 / 3)  # a word counts as often as it is there
    assert m.f1(["mill"], "") == m.f1(["the"], "the") == 0.0
    # 3 of 4 and 3 of 3 characters
    assert m.f1_zh(["老磨坊边"], "老磨坊！") == pytest.approx(6 / 7)


def test_words() -> None:
    assert normal("An ape, a.k.a. the Ape") == "ape aka ape"
    assert units("It's 3.5") == ["it", "s", "3", "5"]
    assert units_zh("第12段：ABC") == ["第", "12", "段", "abc"]


def test_rouge_by_hand() -> None:
    # 4 and 5 words, shared police, the, gunman; pairs: the gunman; in order: police the gunman
    one, two, long = m.rouge(["police killed the gunman"], "police kill the gunman today")
    assert one == pytest.approx(2 * 3 / 9)
    assert two == pytest.approx(2 * 1 / 7)
    assert long == pytest.approx(2 * 3 / 9)
    # ROUGE-L of Lin (2004), section 3.1: "the gunman" is all that stays in order, of 4 and 4 words
    assert m.rouge(["police killed the gunman"], "the gunman kill police").long == pytest.approx(0.5)
    assert m.rouge(["a", "b c"], "b c") == m.Rouge(1.0, 1.0, 1.0)
    assert m.rouge(["a"], "") == m.Rouge(0.0, 0.0, 0.0)
    assert m.rouge_zh(["磨坊很老"], "磨坊老").one == pytest.approx(6 / 7)


ROUGE = (0.6428571428571429, 0.22222222222222224, 0.25)  # rouge1, rouge2, rougeL, use_stemmer=False


def test_rouge_equals_the_library() -> None:
    reference = (
        "Occupy protesters in Los Angeles and Philadelphia defied orders to leave, and a few arrests were reported; "
        "police hope to work with them, an inspector said. Confrontation is never good."
    )
    answer = (
        "Police in Philadelphia said that confrontation is never good. The protesters of Occupy defied a deadline, "
        "and in Los Angeles a few of them were arrested."
    )
    assert m.rouge([reference], answer) == pytest.approx(ROUGE, abs=1e-12)


def test_bleu() -> None:
    # 3 of 4 words, 1 of 3 pairs, both with 4 words: no penalty
    assert m.bleu(["the mill was old"], "the mill is old", order=2) == pytest.approx(math.sqrt(3 / 4 * 1 / 3))
    # clipped: "the" counts twice only
    assert m.bleu(["the cat the mat"], "the the the the", order=1) == 0.5
    assert m.bleu(["a b c d"], "") == m.bleu(["a b c d"], "e f") == 0.0
    assert m.self_bleu(["one two three four five", "six seven eight nine ten"]) == 0.0
    same = ["we keep the old mill", "we keep the old mill", "six seven eight nine ten"]
    assert m.self_bleu(same) == pytest.approx(2 / 3)
    with pytest.raises(OptionError, match="give at least 2"):
        m.self_bleu(["alone"])


def test_classes() -> None:
    classes = ["Sport", "Weather", "Bad Weather", "Law"]
    assert m.class_named(["Bad Weather"], "Bad Weather", classes) == 1.0  # "Weather" is part of the right name
    assert m.class_named(["Weather"], "Bad Weather", classes) == 0.5
    assert m.class_named(["Law"], "Law, Sport or Weather", classes) == pytest.approx(1 / 3)
    assert m.class_named(["Law"], "", classes) == 0.0


def test_letters() -> None:
    for answer, score in (
        ("B", 1.0),
        ("(B)", 1.0),
        ("B. Because A is wrong", 1.0),
        ("The answer is B", 1.0),
        ("A", 0.0),
        ("A and B", 0.0),
        ("", 0.0),
        ("Bob", 0.0),
    ):
        assert m.letters_chosen(["B"], answer) == score, answer
    for answer in ("ACD", "A, C, D", "A, C and D", "D C A"):
        assert m.letters_chosen(["ACD"], answer) == 1.0, answer
    assert m.letters_chosen(["ACD"], "AC") == 0.0


def test_numbers() -> None:
    assert m.number_share(["Paragraph 12"], "Paragraph 12") == 1.0
    assert m.number_share(["12"], "12, 13, 12 or 5") == 0.5
    assert m.number_share(["段落3"], "段落13") == m.number_share(["3"], "three") == 0.0
    assert m.last_number("so -1,234.50 in all") == -1234.5
    assert m.last_number("none") is None
    assert m.same_number(["18"], "9 * 2 = 18.") == m.same_number(["1,000"], "it is $1000.00") == 1.0
    assert m.same_number(["18"], "18 and 2") == m.same_number(["18"], "") == 0.0


def test_code() -> None:
    assert m.similarity("abcd", "bd") == pytest.approx(2 * 2 / 6)
    assert m.similarity("", "") == 1.0
    assert m.similarity("a", "") == 0.0
    assert m.code_similarity(["return x"], "\n```python\n# done\nreturn y\nz") == 0.875
    assert m.code_similarity(["return x"], "") == 0.0
