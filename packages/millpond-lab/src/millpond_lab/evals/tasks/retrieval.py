"""Retrieval tasks: needles in a haystack, key-value pairs (Lost in the Middle), and recalled facts."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from millpond.errors import OptionError
from millpond.option_ranges import MAX_POSITIONS, SOME_POSITIONS, Range
from millpond_lab.evals.data import pond_tasks
from millpond_lab.evals.data.data_files import DataRow, FileTask, read_rows
from millpond_lab.evals.data.generated_task import (
    SEVEN,
    Draft,
    GeneratedTask,
    TokenBudget,
    at_least,
    at_most,
    identifier,
    number,
    one_of,
    stream,
)
from millpond_lab.evals.data.haystack import Haystack, Source, depths
from millpond_lab.evals.data.synthetic_english import keys as draw_keys
from millpond_lab.evals.data.synthetic_english import words
from millpond_lab.evals.metrics import found
from millpond_lab.evals.sample import Question, Sample
from millpond_lab.evals.task import Task, task

_NIAH_INTRO = (
    "Some secret {what}s are hidden in the text below. Read with care: you will be asked for them at the end.\n\n"
)
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
    values: Annotated[int, "needles of a key", SOME_POSITIONS] = 4,
    questions: Annotated[int, "keys with as many needles each; every one is asked for by itself", SOME_POSITIONS] = 1,
    essay: Essay = "",
    digits: Digits = SEVEN,
) -> Task:
    """Find all the values of one key."""
    at_least("niah_multivalue", 1, values=values, questions=questions)
    source, kind = Source("prose", essay), _Kind("niah_multivalue", "number", digits)

    def write(rng: random.Random, index: int) -> Draft:
        names, found = draw_keys(rng, questions), [kind.value(rng) for _ in range(values * questions)]
        needles = [
            (depth, kind.needle(names[i % questions], value))
            for i, (depth, value) in enumerate(zip(depths(rng, len(found)), found, strict=True))
        ]
        asks = tuple(
            Question(
                f"\n\nWhat are all the secret numbers of {key} in the text above? The secret numbers of {key} are",
                tuple(found[i::questions]),
            )
            for i, key in enumerate(names)
        )
        return Draft(kind.context(Haystack(source.sentences(rng)), needles), asks)

    english = {"values": (values, 4), "questions": (questions, 1), **source.english, **kind.english}
    return GeneratedTask("niah_multivalue", length, write, english=english)


@task("niah_multiquery", paper="arXiv:2404.06654")
def niah_multiquery(
    length: Length = 4096,
    queries: Annotated[int, "keys asked for at once", SOME_POSITIONS] = 4,
    questions: Annotated[int, "times that as many other keys are asked for, each by itself", SOME_POSITIONS] = 1,
    essay: Essay = "",
    digits: Digits = SEVEN,
) -> Task:
    """Find the values of several keys in one answer."""
    at_least("niah_multiquery", 1, queries=queries, questions=questions)
    hidden = queries * questions
    source, kind = Source("prose", essay), _Kind("niah_multiquery", "number", digits)

    def write(rng: random.Random, index: int) -> Draft:
        names = draw_keys(rng, hidden)
        values = [kind.value(rng) for _ in names]
        rows = zip(depths(rng, hidden), names, values, strict=True)
        needles = [(depth, kind.needle(key, value)) for depth, key, value in rows]
        shuffled = rng.sample(range(hidden), hidden)
        asks = []
        for order in (shuffled[begin : begin + queries] for begin in range(0, hidden, queries)):
            asked = ", ".join(names[i] for i in order)
            text = f"\n\nWhat are the secret numbers of {asked} in the text above? In this order, they are"
            asks.append(Question(text, tuple(values[i] for i in order)))
        return Draft(kind.context(Haystack(source.sentences(rng)), needles), tuple(asks))

    english = {"queries": (queries, 4), "questions": (questions, 1), **source.english, **kind.english}
    return GeneratedTask("niah_multiquery", length, write, english=english)


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
        return lambda words: _NIAH_INTRO.format(what=self.what) + hay.text(words, needles)

    def others(self, rng: random.Random, taken: set[str]) -> Iterator[str]:
        """An endless stream of needles whose keys are in no question."""
        for turn in itertools.count():
            for key in draw_keys(rng, 1000):
                name = f"{key}-{turn}" if turn else key
                if name not in taken:
                    yield self.needle(name, self.value(rng))


@task("needle")
def needle(
    lengths: Annotated[str, "tokens of context, question and answer, joined by +"] = "1024+2048+4096",
    depths: Annotated[int, "how many depths, evenly from the beginning to the end", SOME_POSITIONS] = 10,
    essay: Annotated[str, "a text file to fill with, instead of sentences made here"] = "",
) -> Task:
    """Find a needle at each depth of each length.

    Sample i lies at depth i mod depths of length i div depths, round and round: lengths x depths samples fill the
    heat map once.
    """
    at_least("needle", 2, depths=depths)
    sizes, source = _lengths(lengths), Source("prose", essay)

    def write(rng: random.Random, index: int) -> Draft:
        depth, length = grid.place(index)
        (key,), value, hay = draw_keys(rng, 1), number(rng), Haystack(source.sentences(rng))
        hidden = [(depth, f"The number to remember is that of the {key}: {value}.")]
        text = f"\n\nWhich number belongs to the {key}? The number of the {key} is"
        facts = {"depth": round(depth, 3)}
        return Draft(lambda n: hay.text(n, hidden), (Question(text, (value,)),), facts, length)

    grid = _Grid("needle", max(sizes), write, english=source.english, depths=depths, sizes=tuple(sizes))
    return grid


@dataclass(frozen=True)
class _Grid(GeneratedTask):
    """Samples at the depths and lengths of a grid, in either language."""

    depths: int = 10
    sizes: tuple[int, ...] = ()

    def place(self, index: int) -> tuple[float, int]:
        """Depth and length of a sample."""
        return index % self.depths / (self.depths - 1), self.sizes[index // self.depths % len(self.sizes)]

    def in_pond(self, count: int, seed: int) -> Iterator[Sample]:
        """A single needle among varied words, at its depth."""
        for index in range(count):
            depth, length = self.place(index)
            own = stream("needle", seed, index).getrandbits(48)
            (made,) = pond_tasks.pond_samples("niah_single", 1, own, length=length, variant=2, depth=depth)
            yield replace(made, id=f"{seed}-{index}", facts={"length": length, "depth": round(depth, 3)})


def _lengths(text: str) -> list[int]:
    parts = [part.strip() for part in text.split("+")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise OptionError(f"needle: lengths={text!r} must be whole numbers above 0 joined by +, for example 1024+4096")
    return [int(part) for part in parts]


_KV_INTRO = "Read the value of one key out of the JSON object below.\n\nJSON data:\n"


@task("kv_retrieval", paper="arXiv:2307.03172")
def kv_retrieval(
    path: Annotated[str, "a file with ordered_kv_records (a list of [key, value]), key and value; may end in .gz"] = "",
    gold: Annotated[
        int, "where the wanted pair stands, from 0; -1: where the file has it", Range(-1, MAX_POSITIONS)
    ] = -1,
) -> Task:
    """Read one value out of a long JSON object of random keys."""
    if gold < -1:
        raise OptionError(f"kv_retrieval: gold={gold} must be a place from 0, or -1 for the file's own")

    def make(row: DataRow, room: TokenBudget) -> Sample:
        key, value = row.words("key"), row.words("value")
        records = _records(row)
        if [key, value] not in records:
            raise row.error("key", f"{key!r} with the field 'value' is not among ordered_kv_records")
        place = records.index([key, value])
        if gold >= 0:
            if gold >= len(records):
                raise OptionError(f"kv_retrieval: gold={gold}, and row {row.number} has {len(records)} pairs; lower it")
            records.insert(gold, records.pop(place))
            place = gold
        lines = ",\n ".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in records)
        question = Question(f'\n\nKey: "{key}"\nIts value:', (value,), 64)
        facts = {"pairs": len(records), "depth": round(place / max(len(records) - 1, 1), 3)}
        return Sample(row.name, f"{_KV_INTRO}{{{lines}}}", (question,), facts)

    return FileTask("kv_retrieval", lambda: read_rows(path), make, lambda q, answer: found(q.references, answer))


def _records(row: DataRow) -> list[list[str]]:
    value: Any = row.fields.get("ordered_kv_records")
    if not isinstance(value, list) or not value or not all(_is_pair(each) for each in value):
        raise row.error("ordered_kv_records", "must be a list of [key, value] pairs of text")
    return [list(each) for each in value]


def _is_pair(each: Any) -> bool:
    return isinstance(each, list) and len(each) == 2 and all(isinstance(part, str) for part in each)


_RECALL_INTRO = "Code words are hidden in the text below. Read it with care: you will be asked for them at the end.\n\n"

Pairs = Annotated[int, "keys in the text", SOME_POSITIONS]
Questions = Annotated[int, "how many of the keys are asked for, each by itself", SOME_POSITIONS]


@task("recall")
def recall(length: Length = 4096, pairs: Pairs = 32, questions: Questions = 1, essay: Essay = "") -> Task:
    """Recall the values of keys among many pairs in filler."""
    return _recall("recall", length, pairs, 1, questions, essay)


@task("overwritten")
def overwritten(
    length: Length = 4096,
    pairs: Pairs = 12,
    times: Annotated[
        int, "times that each key is given a value; the last one counts (for pond-recall always 2)", SOME_POSITIONS
    ] = 4,
    questions: Questions = 1,
    essay: Essay = "",
) -> Task:
    """Recall the latest values of keys that are given new values again and again."""
    at_least("overwritten", 2, times=times)
    return _recall("overwritten", length, pairs, times, questions, essay)


def _recall(name: str, length: int, pairs: int, times: int, questions: int, essay: str) -> Task:
    at_least(name, 1, pairs=pairs, questions=questions)
    at_most(name, "questions", questions, "pairs", pairs)
    source, latest = Source("prose", essay), "latest " if times > 1 else ""
    intro = _RECALL_INTRO + ("A key may be given a new code word; only the latest one counts.\n\n" if times > 1 else "")

    def write(rng: random.Random, index: int) -> Draft:
        names, values = draw_keys(rng, pairs), words(rng, pairs * times)
        given = [(names[i % pairs], value) for i, value in enumerate(values)]
        rng.shuffle(given)
        where = depths(rng, len(given))
        needles = [(d, f"The code word of {key} is {value}.") for d, (key, value) in zip(where, given, strict=True)]
        last = {key: (value, depth) for depth, (key, value) in zip(where, given, strict=True)}
        asked, hay = rng.sample(names, questions), Haystack(source.sentences(rng))
        texts = [f"the {latest}code word of {key}" for key in asked]
        asks = tuple(
            Question(f"\n\nWhat is {text} in the text above? {text.capitalize()} is", (last[key][0],))
            for text, key in zip(texts, asked, strict=True)
        )
        facts = {"depth": [round(last[key][1], 3) for key in asked]}
        return Draft(lambda n: intro + hay.text(n, needles), asks, facts)

    english = {"times": (times, 4), **source.english} if times > 1 else source.english
    return GeneratedTask(name, length, write, {"pairs": pairs, "questions": questions}, english)
