"""Needles in a haystack, RULER's four families (Hsieh et al., arXiv:2404.06654), in texts of our own."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Annotated, Literal

from millpond.errors import OptionError
from millpond.option_ranges import SOME_POSITIONS, Range
from millpond_lab.evals.data.generated_task import Draft, GeneratedTask, at_least, at_most, one_of
from millpond_lab.evals.data.haystack import Haystack, depths
from millpond_lab.evals.data.random_streams import SEVEN, identifier, number
from millpond_lab.evals.data.sentence_source import Source
from millpond_lab.evals.data.synthetic_english import keys as draw_keys
from millpond_lab.evals.sample import Question
from millpond_lab.evals.task import Task, task

_INTRO = "Some secret {what}s are hidden in the text below. Read with care: you will be asked for them at the end.\n\n"
_NEEDLE = "The secret {what} of {key} is {value}."

Length = Annotated[int, "tokens of context, question and answer", SOME_POSITIONS]
Essay = Annotated[str, "a text file to fill with, instead of sentences made here"]
Digits = Annotated[int, "digits of a number; what takes several tokens must be kept as a whole", SOME_POSITIONS]


@task("niah_single", paper="arXiv:2404.06654")
def niah_single(
    length: Length = 4096,
    variant: Annotated[
        int, "1: a number among repeated sentences, 2: a number in prose, 3: a UUID in prose", Range(1, 3)
    ] = 1,
    essay: Essay = "",
    digits: Digits = SEVEN,
) -> Task:
    """Find the one needle in a haystack."""
    one_of("niah_single", variant=variant, among=(1, 2, 3))
    source = Source("noise" if variant == 1 else "prose", essay)
    kind = _Kind("niah_single", "identifier" if variant == 3 else "number", digits)

    def write(rng: random.Random, index: int) -> Draft:
        (key,), (depth,), value = draw_keys(rng, 1), depths(rng, 1), kind.value(rng)
        hay, needles = Haystack(source.sentences(rng)), [(depth, kind.needle(key, value))]
        return Draft(kind.context(hay, needles), (kind.question(key, value),), {"depth": round(depth, 3)})

    return GeneratedTask("niah_single", length, write, {"variant": variant}, {**source.english, **kind.english})


@task("niah_multikey", paper="arXiv:2404.06654")
def niah_multikey(
    length: Length = 4096,
    variant: Annotated[
        int, "1: some needles in prose, 2: a text of nothing but needles, 3: the same with UUIDs", Range(1, 3)
    ] = 1,
    keys: Annotated[
        int, "needles of which some are asked for; variants 2 and 3 add more until the text is full", SOME_POSITIONS
    ] = 4,
    questions: Annotated[int, "how many of the keys are asked for, each by itself", SOME_POSITIONS] = 1,
    essay: Essay = "",
    digits: Digits = SEVEN,
) -> Task:
    """Find one needle among others like it."""
    at_least("niah_multikey", 1, keys=keys, questions=questions)
    at_most("niah_multikey", "questions", questions, "keys", keys)
    one_of("niah_multikey", variant=variant, among=(1, 2, 3))
    kind = _Kind("niah_multikey", "identifier" if variant == 3 else "number", digits)
    if essay:
        one_of("niah_multikey with an essay", variant=variant, among=(1,))
    source = Source("prose", essay)

    def write(rng: random.Random, index: int) -> Draft:
        names, where = draw_keys(rng, keys), depths(rng, keys)
        values = [kind.value(rng) for _ in names]
        needles = [(d, kind.needle(k, v)) for d, k, v in zip(where, names, values, strict=True)]
        hay = Haystack(source.sentences(rng) if variant == 1 else kind.others(rng, set(names)))
        asked = rng.sample(range(keys), questions)
        texts = tuple(kind.question(names[i], values[i]) for i in asked)
        return Draft(kind.context(hay, needles), texts, {"depth": [round(where[i], 3) for i in asked]})

    english = {"keys": (keys, 4), **source.english, **kind.english}
    return GeneratedTask("niah_multikey", length, write, {"variant": variant, "questions": questions}, english)


@task("niah_multivalue", paper="arXiv:2404.06654")
def niah_multivalue(
    length: Length = 4096,
    values: Annotated[int, "needles of the one key", SOME_POSITIONS] = 4,
    essay: Essay = "",
    digits: Digits = SEVEN,
) -> Task:
    """Find all the values of one key."""
    at_least("niah_multivalue", 1, values=values)
    source, kind = Source("prose", essay), _Kind("niah_multivalue", "number", digits)

    def write(rng: random.Random, index: int) -> Draft:
        (key,), found = draw_keys(rng, 1), [kind.value(rng) for _ in range(values)]
        needles = [(depth, kind.needle(key, v)) for depth, v in zip(depths(rng, values), found, strict=True)]
        text = f"\n\nWhat are all the secret numbers of {key} in the text above? The secret numbers of {key} are"
        return Draft(kind.context(Haystack(source.sentences(rng)), needles), (Question(text, tuple(found)),))

    return GeneratedTask(
        "niah_multivalue", length, write, english={"values": (values, 4), **source.english, **kind.english}
    )


@task("niah_multiquery", paper="arXiv:2404.06654")
def niah_multiquery(
    length: Length = 4096,
    queries: Annotated[int, "keys asked for at once", SOME_POSITIONS] = 4,
    essay: Essay = "",
    digits: Digits = SEVEN,
) -> Task:
    """Find the values of several keys in one answer."""
    at_least("niah_multiquery", 1, queries=queries)
    source, kind = Source("prose", essay), _Kind("niah_multiquery", "number", digits)

    def write(rng: random.Random, index: int) -> Draft:
        names = draw_keys(rng, queries)
        values = [kind.value(rng) for _ in names]
        rows = zip(depths(rng, queries), names, values, strict=True)
        needles = [(depth, kind.needle(key, value)) for depth, key, value in rows]
        order = rng.sample(range(queries), queries)
        asked = ", ".join(names[i] for i in order)
        text = f"\n\nWhat are the secret numbers of {asked} in the text above? In this order, they are"
        question = Question(text, tuple(values[i] for i in order))
        return Draft(kind.context(Haystack(source.sentences(rng)), needles), (question,))

    return GeneratedTask(
        "niah_multiquery", length, write, english={"queries": (queries, 4), **source.english, **kind.english}
    )


class _Kind:
    """What is hidden, in words: numbers or identifiers."""

    def __init__(self, owner: str, what: Literal["number", "identifier"], digits: int) -> None:
        at_least(owner, 1, digits=digits)
        self.what, self.digits = what, digits
        if what == "identifier" and digits != SEVEN:
            raise OptionError(f"{owner}: digits={digits} is for numbers, and variant 3 hides identifiers; leave it out")

    def value(self, rng: random.Random) -> str:
        return number(rng, self.digits) if self.what == "number" else identifier(rng)

    @property
    def english(self) -> dict[str, tuple[int, int]]:
        """Identifiers are no words of `pond-recall`, and its numbers are words."""
        return {"variant": (3, 1)} if self.what == "identifier" else {"digits": (self.digits, SEVEN)}

    def needle(self, key: str, value: str) -> str:
        return _NEEDLE.format(what=self.what, key=key, value=value)

    def question(self, key: str, value: str) -> Question:
        what = f"the secret {self.what} of {key}"
        return Question(f"\n\nWhat is {what} in the text above? {what.capitalize()} is", (value,))

    def context(self, hay: Haystack, needles: list[tuple[float, str]]) -> Callable[[int], str]:
        return lambda words: _INTRO.format(what=self.what) + hay.text(words, needles)

    def others(self, rng: random.Random, taken: set[str]) -> Iterator[str]:
        """An endless stream of needles whose keys are in no question."""
        for turn in itertools.count():
            for key in draw_keys(rng, 1000):
                name = f"{key}-{turn}" if turn else key
                if name not in taken:
                    yield self.needle(name, self.value(rng))
