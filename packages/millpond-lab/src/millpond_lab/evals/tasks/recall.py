"""Many pairs in one text, and which belongs to which: the plainest test of what a cache has kept."""

from __future__ import annotations

import random
from typing import Annotated

from millpond.option_ranges import SOME_POSITIONS
from millpond_lab.evals.data.generated_task import Draft, GeneratedTask, at_least, at_most
from millpond_lab.evals.data.haystack import Haystack, depths
from millpond_lab.evals.data.sentence_source import Source
from millpond_lab.evals.data.synthetic_english import keys, words
from millpond_lab.evals.sample import Question
from millpond_lab.evals.task import Task, task

_INTRO = "Code words are hidden in the text below. Read it with care: you will be asked for them at the end.\n\n"

Length = Annotated[int, "tokens of context, question and answer", SOME_POSITIONS]
Pairs = Annotated[int, "keys in the text", SOME_POSITIONS]
Questions = Annotated[int, "how many of the keys are asked for, each by itself", SOME_POSITIONS]
Essay = Annotated[str, "a text file to fill with, instead of sentences made here"]


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
    intro = _INTRO + ("A key may be given a new code word; only the latest one counts.\n\n" if times > 1 else "")

    def write(rng: random.Random, index: int) -> Draft:
        names, values = keys(rng, pairs), words(rng, pairs * times)
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
