"""Scores of answers: pure functions from text to a number between 0 and 1. They know no task and no model."""

from __future__ import annotations

import math
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from millpond.errors import OptionError

_DIGITS = re.compile(r"[0-9]+")
_NUMBER = re.compile(r"-?[0-9][0-9,]*(?:\.[0-9]+)?|-?\.[0-9]+")


def number_share(references: Sequence[str], answer: str) -> float:
    """Share of the numbers in the answer that are the wanted one (the first in a reference); the best reference.

    LongBench scores counting and finding a paragraph so: who names many numbers gains little.

    Example:
        >>> number_share(["Paragraph 7"], "Paragraph 7, or perhaps 12")
        0.5
    """
    numbers = _DIGITS.findall(answer)
    wanted = [digits[0] for reference in references if (digits := _DIGITS.findall(reference))]
    return max((numbers.count(each) / len(numbers) for each in wanted), default=0.0) if numbers else 0.0


def last_number(text: str) -> float | None:
    """The last number in a text, thousands separators removed, None if there is none.

    Example:
        >>> last_number("16 - 3 is 13, so $1,300.")
        1300.0
    """
    numbers = _NUMBER.findall(text)
    return float(numbers[-1].replace(",", "")) if numbers else None


def same_number(references: Sequence[str], answer: str) -> float:
    """1 if the last number of the answer is that of a reference, else 0."""
    number = last_number(answer)
    return float(number is not None and number in [last_number(reference) for reference in references])


def common_length(left: Sequence[Hashable], right: Sequence[Hashable]) -> int:
    """Length of the longest common subsequence, with one whole number as a row of bits (Hyyrö, 2004).

    Example:
        >>> common_length("pond mill", "open hill")
        6
    """
    where: dict[Hashable, int] = {}
    for index, item in enumerate(left):
        where[item] = where.get(item, 0) | 1 << index
    full = (1 << len(left)) - 1
    row = full
    for item in right:
        hits = row & where.get(item, 0)
        row = (row + hits | row - hits) & full
    return len(left) - row.bit_count()


def f_measure(same: float, left: int, right: int) -> float:
    """Harmonic mean of precision and recall of `same` items out of `left` and `right`; 0 where nothing is shared."""
    return 2 * same / (left + right) if same else 0.0


_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_UNITS = re.compile(r"[a-z0-9]+")
#: Han characters one by one, everything else in runs.
_HAN = re.compile(r"[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]|[^\W\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]+")


def normal(text: str) -> str:
    """Lower case, no ASCII punctuation, no articles, single spaces, as question answering is scored since SQuAD.

    Example:
        >>> normal("The Mill,  a pond!")
        'mill pond'
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def units(text: str) -> list[str]:
    """Lower-case runs of ASCII letters and digits: what ROUGE counts (Lin, 2004; no stemming).

    Example:
        >>> units("Two ponds, 1 mill-wheel.")
        ['two', 'ponds', '1', 'mill', 'wheel']
    """
    return _UNITS.findall(text.lower())


def units_zh(text: str) -> list[str]:
    """Chinese text by characters, runs of other letters and digits as they are; punctuation is left out.

    Example:
        >>> units_zh("磨坊，2024年 GDP。")
        ['磨', '坊', '2024', '年', 'gdp']
    """
    return _HAN.findall(unicodedata.normalize("NFKC", text).lower())


def exact(references: Sequence[str], answer: str) -> float:
    """1 if the answer equals a reference once case, punctuation and articles are gone, else 0.

    Example:
        >>> exact(["The mill"], "mill.")
        1.0
    """
    return float(normal(answer) in map(normal, references))


def f1(references: Sequence[str], answer: str) -> float:
    """The best F1 of the words shared with a reference.

    Example:
        >>> f1(["the old mill pond"], "an old mill")  # 2 shared, of 3 and of 2
        0.8
    """
    return max(_shared(normal(reference).split(), normal(answer).split()) for reference in references)


def f1_zh(references: Sequence[str], answer: str) -> float:
    """`f1` for Chinese.

    Departs from LongBench: text is cut into characters, not into words by a dictionary that would have to be installed.

    Example:
        >>> f1_zh(["磨坊"], "磨坊。")
        1.0
    """
    return max(_shared(units_zh(reference), units_zh(answer)) for reference in references)


def _shared(left: list[str], right: list[str]) -> float:
    return f_measure((Counter(left) & Counter(right)).total(), len(left), len(right))


_CONTROL = re.compile(r"[\x00-\x1f]")


def found(references: Sequence[str], answer: str) -> float:
    """Share of the references that occur in the answer, whatever the case, as whole words.

    RULER's `string_match_all`, but for the whole words: "pear" is not found in "pearl".

    Example:
        >>> found(["8126", "Mill"], "It is 8126, or the windmill.")
        0.5
    """
    return sum(_holds(answer, reference) for reference in references) / len(references)


def found_any(references: Sequence[str], answer: str) -> float:
    """1 if any reference occurs in the answer, whatever the case, as whole words, else 0."""
    return float(any(_holds(answer, reference) for reference in references))


def string_match_all(references: Sequence[str], answer: str) -> float:
    """Share of the references that occur in the answer, whatever the case, in words too: RULER's score of its files.

    Example:
        >>> string_match_all(["8126", "Mill"], "It is 81267, or the windmill.")
        1.0
    """
    text = _printable(answer)
    return sum(reference.lower() in text for reference in references) / len(references)


def string_match_part(references: Sequence[str], answer: str) -> float:
    """1 if any reference occurs in the answer, whatever the case, in words too, else 0: RULER's for questions."""
    text = _printable(answer)
    return float(any(reference.lower() in text for reference in references))


def in_order(references: Sequence[str], answer: str) -> float:
    """Share of the words of a passage that an answer repeats in their order.

    Example:
        >>> in_order(["one two three four"], "one three two four")
        0.75
    """
    words = " ".join(references).lower().split()
    return common_length(words, answer.lower().split()) / len(words)


def _printable(answer: str) -> str:
    """As RULER reads answers: control characters are line breaks, and none at the ends."""
    return _CONTROL.sub("\n", answer.strip()).strip().lower()


def _holds(answer: str, reference: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(reference.strip())}(?!\w)", answer, re.IGNORECASE) is not None


#: Capitals alone, in a row or in a list: "B", "(B)", "ABD", "A, C and D". What comes after another word is not chosen.
_LETTERS = re.compile(r"(?<![\w'])[A-H]+(?![\w'])(?:(?:[\s,/&().]|and)+[A-H]+(?![\w']))*")


def class_named(references: Sequence[str], answer: str, classes: Sequence[str]) -> float:
    """1 over the number of classes that the answer names, if the right one is among them, else 0 (LongBench).

    A class whose name is part of the right one's does not count as named.

    Example:
        >>> class_named(["Weather"], "Weather or Sport", ["Weather", "Sport", "Law"])
        0.5
    """
    return max(_named(reference, answer, classes) for reference in references)


def _named(right: str, answer: str, classes: Sequence[str]) -> float:
    named = {name for name in (*classes, right) if name in answer and (name == right or name not in right)}
    return 1 / len(named) if right in named else 0.0


def letters_chosen(references: Sequence[str], answer: str) -> float:
    """1 if the letters that the answer names first are exactly those of a reference, else 0.

    Example:
        >>> letters_chosen(["AC"], "A and C, since both hold")
        1.0
        >>> letters_chosen(["B"], "The answer is (D).")
        0.0
    """
    chosen = _letters(answer)
    return float(bool(chosen) and chosen in [_letters(reference) for reference in references])


def _letters(text: str) -> frozenset[str]:
    first = _LETTERS.search(text)
    return frozenset(first.group()) & frozenset("ABCDEFGH") if first else frozenset()


def bleu(references: Sequence[str], answer: str, order: int = 4) -> float:
    """Geometric mean of the clipped n-gram precisions up to `order`, times the brevity penalty.

    BLEU = min(1, e^(1 - r/c)) prod_n p_n^(1/order), with r the reference length nearest to the answer's length c.

    Example:
        >>> round(bleu(["the mill keeps the water"], "the mill keeps water", order=2), 4)  # e^-1/4 (1 x 2/3)^1/2
        0.6359
    """
    texts, mine = [units(reference) for reference in references], units(answer)
    if not mine:
        return 0.0
    logs = 0.0
    for n in range(1, order + 1):
        best: Counter[tuple[str, ...]] = Counter()
        for text in texts:
            best |= _grams(text, n)
        grams = _grams(mine, n)
        same = (grams & best).total()
        if not same:
            return 0.0
        logs += math.log(same / grams.total()) / order
    nearest = min((abs(len(text) - len(mine)), len(text)) for text in texts)[1]
    return math.exp(logs + min(0.0, 1 - nearest / len(mine)))


def self_bleu(answers: Sequence[str], order: int = 4) -> float:
    """Mean BLEU of each answer against all the others: 1 where all say the same.

    Raises:
        OptionError: fewer than two answers, which are like nothing.

    Example:
        >>> self_bleu(["keep the old mill running", "keep the old mill running"])
        1.0
    """
    if len(answers) < 2:
        raise OptionError(f"self-BLEU compares answers with each other, and {len(answers)} was given; give at least 2")
    scores = [bleu([*answers[:i], *answers[i + 1 :]], answer, order) for i, answer in enumerate(answers)]
    return sum(scores) / len(scores)


def _grams(text: list[str], n: int) -> Counter[tuple[str, ...]]:
    return Counter(zip(*(text[i:] for i in range(n)), strict=False))


class Rouge(NamedTuple):
    """The three F-measures."""

    one: float
    two: float
    long: float


def rouge(references: Sequence[str], answer: str) -> Rouge:
    """Each measure for the reference that is best by it.

    Example:
        >>> rouge(["the mill keeps the water"], "the mill loses water").one  # 3 shared, of 4 and of 5
        0.6666666666666666
    """
    return _best([units(reference) for reference in references], units(answer))


def rouge_zh(references: Sequence[str], answer: str) -> Rouge:
    """`rouge` over Chinese characters.

    Departs from LongBench: text is cut into characters, not into words by a dictionary that would have to be installed.
    """
    return _best([units_zh(reference) for reference in references], units_zh(answer))


def _best(references: list[list[str]], answer: list[str]) -> Rouge:
    rows = [(_rouge_grams(each, answer, 1), _rouge_grams(each, answer, 2), _long(each, answer)) for each in references]
    return Rouge(*(max(column) for column in zip(*rows, strict=True)))


def _rouge_grams(left: list[str], right: list[str], n: int) -> float:
    counts = [Counter(zip(*(text[i:] for i in range(n)), strict=False)) for text in (left, right)]
    return f_measure((counts[0] & counts[1]).total(), counts[0].total(), counts[1].total())


def _long(left: list[str], right: list[str]) -> float:
    return f_measure(common_length(left, right), len(left), len(right))


#: A line with one of these is prose, a comment or a fence of Markdown.
_NOT_CODE = ("`", "#", "//")


def similarity(left: str, right: str) -> float:
    """1 - d / (both lengths), with d the insertions and deletions that turn one text into the other.

    Example:
        >>> similarity("return x", "return y")  # 7 shared, of 16
        0.875
    """
    return 2 * common_length(left, right) / (len(left) + len(right)) if left or right else 1.0


def code_similarity(references: Sequence[str], answer: str) -> float:
    """The best similarity of the answer's first line of code (LongBench's rule) with a reference.

    Example:
        >>> code_similarity(["x = 1"], "# set x\\nx = 1\\ny = 2")
        1.0
    """
    lines = answer.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in _NOT_CODE)), "")
    return max(similarity(line, reference) for reference in references)


__all__ = [
    "Rouge",
    "bleu",
    "class_named",
    "code_similarity",
    "exact",
    "f1",
    "f1_zh",
    "found",
    "found_any",
    "in_order",
    "last_number",
    "letters_chosen",
    "number_share",
    "rouge",
    "rouge_zh",
    "same_number",
    "self_bleu",
    "similarity",
    "string_match_all",
    "string_match_part",
]
