"""The task of repeating a passage of the text word for word."""

from __future__ import annotations

import itertools
import random
from typing import Annotated

from millpond.option_ranges import SOME_POSITIONS
from millpond_lab.evals.data.generated_task import Draft, GeneratedTask, at_least
from millpond_lab.evals.data.haystack import Haystack, depths
from millpond_lab.evals.data.sentence_source import Source
from millpond_lab.evals.data.synthetic_english import keys
from millpond_lab.evals.metrics import in_order
from millpond_lab.evals.sample import Question
from millpond_lab.evals.task import Task, task


@task("copy")
def copy(
    length: Annotated[int, "tokens of context, question and answer", SOME_POSITIONS] = 4096,
    passages: Annotated[int, "passages in the text, each under a name; one is asked for", SOME_POSITIONS] = 4,
    words: Annotated[int, "words of a passage", SOME_POSITIONS] = 8,
    essay: Annotated[str, "a text file to fill with, instead of sentences made here"] = "",
) -> Task:
    """Repeat a named passage word for word; the score is the share of its words that come back in order."""
    at_least("copy", 1, passages=passages, words=words)
    source = Source("prose", essay)

    def write(rng: random.Random, index: int) -> Draft:
        stream = (word for sentence in source.sentences(rng) for word in sentence.split())
        texts = [" ".join(itertools.islice(stream, words)) for _ in range(passages)]
        names, where = keys(rng, passages), depths(rng, passages)
        needles = [(d, f"[[ {name}: {text} ]]") for d, name, text in zip(where, names, texts, strict=True)]
        asked, hay = rng.randrange(passages), Haystack(source.sentences(rng))
        intro = "Passages with a name stand in double brackets in the text below.\n\n"
        text = f"\n\nRepeat the passage named {names[asked]} word for word, without name and brackets:"
        question = Question(text, (texts[asked],))
        return Draft(lambda n: intro + hay.text(n, needles), (question,), {"depth": round(where[asked], 3)})

    return GeneratedTask("copy", length, write, {"passages": passages, "words": words}, source.english, in_order)
