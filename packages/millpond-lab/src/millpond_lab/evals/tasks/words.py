"""Tasks about words: common and frequent words, variable tracking, and copying."""

from __future__ import annotations

import itertools
import random
from typing import Annotated

from millpond.errors import OptionError
from millpond.option_ranges import POSITIONS, SOME_POSITIONS, Range
from millpond_lab.evals.data.generated_task import Draft, GeneratedTask, at_least, at_most, letters, number
from millpond_lab.evals.data.haystack import Haystack, Source, depths
from millpond_lab.evals.data.synthetic_english import ALL_WORDS, keys, words
from millpond_lab.evals.metrics import in_order
from millpond_lab.evals.sample import Question
from millpond_lab.evals.task import Task, task

#: Ranks beyond this one have no word, even at a million tokens.
_RANKS = 1000


@task("common_words", paper="arXiv:2404.06654")
def common_words(
    length: Annotated[int, "tokens of context, question and answer", SOME_POSITIONS] = 4096,
    common: Annotated[int, "words that occur often, all asked for", SOME_POSITIONS] = 10,
    often: Annotated[int, "times that each of them occurs; 0: 30, or 6 below 4,096 tokens", POSITIONS] = 0,
    seldom: Annotated[int, "times that every other word occurs; 0: 3, or 1 below 4,096 tokens", POSITIONS] = 0,
) -> Task:
    """Name the words that occur most often in a numbered list."""
    at_least("common_words", 1, common=common)
    at_least("common_words", 0, often=often, seldom=seldom)
    many, few = often or (30 if length >= 4096 else 6), seldom or (3 if length >= 4096 else 1)
    if few >= many:
        raise OptionError(f"common_words: seldom={few} must be below often={many}; raise often or lower seldom")

    def write(rng: random.Random, index: int) -> Draft:
        drawn, order = words(rng, ALL_WORDS), rng.getrandbits(64)
        top, rest = drawn[:common], drawn[common:]

        def context(n: int) -> str:
            entries = top * many + rest[:n] * few
            random.Random(order).shuffle(entries)
            listed = " ".join(f"{i}. {word}" for i, word in enumerate(entries, start=1))
            return f"Below is a numbered list in which some words occur more often than others.\n\n{listed}"

        text = f"\n\nWhich {common} words occur most often in the list? The {common} most common words are"
        return Draft(context, (Question(text, tuple(top)),), most=len(rest))

    english = {"common": (common, 10), "often": (often, 0), "seldom": (seldom, 0)}
    return GeneratedTask("common_words", length, write, english=english)


@task("frequent_words", paper="arXiv:2404.06654")
def frequent_words(
    length: Annotated[int, "tokens of context, question and answer", SOME_POSITIONS] = 4096,
    alpha: Annotated[
        float, "how steeply counts fall: the word of rank k occurs in proportion to k^-alpha", Range(0.0, 100.0)
    ] = 2.0,
) -> Task:
    """Name the three most frequent words of a coded text, whose words follow Zipf's law.

    Departs from RULER: counts are the rounded-down expectations, not draws, so that the third word is always ahead of
    the fourth.
    """
    if alpha <= 0:
        raise OptionError(f"frequent_words: alpha={alpha} must be above 0")
    weights = [rank**-alpha for rank in range(1, _RANKS + 1)]
    shares = [weight / sum(weights) for weight in weights]

    def write(rng: random.Random, index: int) -> Draft:
        coded = list(dict.fromkeys(letters(rng, 6) for _ in range(_RANKS + 50)))[:_RANKS]
        order = rng.getrandbits(64)
        least = next(n for n in itertools.count(4) if int(n * shares[2]) > int(n * shares[3]) > 0)

        def context(n: int) -> str:
            counts = [int((least + n) * share) for share in shares]
            text = [word for word, count in zip(coded, counts, strict=True) for _ in range(count)]
            random.Random(order).shuffle(text)
            return f"Below is a coded text. Its words mean nothing; count them.\n\n{' '.join(text)}"

        asked = "\n\nWhich three words occur most often in the coded text? The three most frequent words are"
        return Draft(context, (Question(asked, tuple(coded[:3])),))

    return GeneratedTask("frequent_words", length, write, english={"alpha": (alpha, 2.0)})


_INTRO = "Assignments to variables are hidden in the text below. Follow them as they pass a value on.\n\n"


@task("tracking", paper="arXiv:2404.06654")
def tracking(
    length: Annotated[int, "tokens of context, question and answer", SOME_POSITIONS] = 4096,
    chains: Annotated[
        int | None,
        "chains of assignments, each from a value of its own; one is asked for (1; for pond-recall 4)",
        SOME_POSITIONS,
    ] = None,
    hops: Annotated[int, "times that a value is passed on in a chain", SOME_POSITIONS] = 4,
    questions: Annotated[int, "how many of the chains are asked for, each by itself", SOME_POSITIONS] = 1,
) -> Task:
    """Name every variable that holds a value, through a chain of assignments."""
    n_chains, source = 1 if chains is None else chains, Source("noise")
    at_least("tracking", 1, chains=n_chains, hops=hops, questions=questions)
    at_most("tracking", "questions", questions, "chains", n_chains)

    def write(rng: random.Random, index: int) -> Draft:
        names = _names(rng, n_chains * (hops + 1))
        rows = [names[i::n_chains] for i in range(n_chains)]
        values = [number(rng, 5) for _ in rows]
        while len({*values}) < n_chains:
            values = [number(rng, 5) for _ in rows]
        needles = []
        for row, value in zip(rows, values, strict=True):
            holds = [value, *row[:-1]]
            steps = [f"VAR {name} = {held}." for name, held in zip(row, holds, strict=True)]
            needles += list(zip(depths(rng, hops + 1), steps, strict=True))
        first, hay = rng.randrange(n_chains), Haystack(source.sentences(rng))
        asks = tuple(
            Question(
                f"\n\nWhich {hops + 1} variables hold the value {values[i]}, directly or through other variables? "
                f"The variables are",
                tuple(rows[i]),
            )
            for i in ((first + more) % n_chains for more in range(questions))
        )
        return Draft(lambda n: _INTRO + hay.text(n, needles), asks)

    return GeneratedTask(
        "tracking", length, write, {"chains": chains, "hops": hops}, english={"questions": (questions, 1)}
    )


def _names(rng: random.Random, count: int) -> list[str]:
    names: dict[str, None] = {}
    while len(names) < count:
        names[letters(rng, 5).upper()] = None
    return list(names)


@task("copy")
def copy(
    length: Annotated[int, "tokens of context, question and answer", SOME_POSITIONS] = 4096,
    passages: Annotated[int, "passages in the text, each under a name; one is asked for", SOME_POSITIONS] = 4,
    words: Annotated[int, "words of a passage", SOME_POSITIONS] = 8,
    questions: Annotated[int, "how many of the passages are asked for, each by itself", SOME_POSITIONS] = 1,
    essay: Annotated[str, "a text file to fill with, instead of sentences made here"] = "",
) -> Task:
    """Repeat a named passage word for word; the score is the share of its words that come back in order."""
    at_least("copy", 1, passages=passages, words=words, questions=questions)
    at_most("copy", "questions", questions, "passages", passages)
    source = Source("prose", essay)

    def write(rng: random.Random, index: int) -> Draft:
        stream = (word for sentence in source.sentences(rng) for word in sentence.split())
        texts = [" ".join(itertools.islice(stream, words)) for _ in range(passages)]
        names, where = keys(rng, passages), depths(rng, passages)
        needles = [(d, f"[[ {name}: {text} ]]") for d, name, text in zip(where, names, texts, strict=True)]
        first, hay = rng.randrange(passages), Haystack(source.sentences(rng))
        intro = "Passages with a name stand in double brackets in the text below.\n\n"
        asked = [(first + more) % passages for more in range(questions)]
        asks = tuple(
            Question(f"\n\nRepeat the passage named {names[i]} word for word, without name and brackets:", (texts[i],))
            for i in asked
        )
        found = [round(where[i], 3) for i in asked]
        return Draft(lambda n: intro + hay.text(n, needles), asks, {"depth": found if questions > 1 else found[0]})

    english = {"questions": (questions, 1), **source.english}
    return GeneratedTask("copy", length, write, {"passages": passages, "words": words}, english, in_order)
