"""Facts in running text, of the kind that `pond-text` and `pond-text-long` were trained to recall."""

from __future__ import annotations

import random
from typing import Annotated, Literal

from millpond.errors import OptionError
from millpond.option_ranges import SOME_POSITIONS
from millpond_lab.evals.data.generated_task import Draft, EnglishTask, at_least, at_most
from millpond_lab.evals.data.haystack import Haystack, depths
from millpond_lab.evals.data.sentence_source import Source
from millpond_lab.evals.sample import Question
from millpond_lab.evals.task import Task, task
from millpond_lab.pond.english_facts import MOST_FACTS, NUMBER_FORMS, WORD_FORMS, draw_facts


@task("pond_facts")
def pond_facts(
    length: Annotated[int, "tokens of context, question and answer", SOME_POSITIONS] = 1024,
    answer: Annotated[Literal["any", "number", "word"], "a number of 3 to 5 digits, a word, or either"] = "any",
    facts: Annotated[int, "facts in the text, of one kind", SOME_POSITIONS] = 6,
    questions: Annotated[int, "how many of them are asked for, each by itself", SOME_POSITIONS] = 1,
    essay: Annotated[str, "a text file to fill with, instead of sentences made here"] = "",
) -> Task:
    """Recall facts of the kind that pond-text and pond-text-long know, hidden in running text.

    The sentences are those of the models' training, since models of five million parameters understand no others. Last
    names, things and the random stream are not those that heads and gates of these models were trained on.
    """
    at_least("pond_facts", 1, facts=facts, questions=questions)
    at_most("pond_facts", "questions", questions, "facts", facts)
    if facts > MOST_FACTS:
        raise OptionError(f"pond_facts: facts={facts} must be at most {MOST_FACTS}, of which each has another answer")
    forms = {"any": NUMBER_FORMS + WORD_FORMS, "number": NUMBER_FORMS, "word": WORD_FORMS}[answer]
    source = Source("prose", essay)

    def write(rng: random.Random, index: int) -> Draft:
        drawn, where = draw_facts(rng, facts, forms[index % len(forms)], "asked"), depths(rng, facts)
        needles = [(depth, fact.told) for depth, fact in zip(where, drawn, strict=True)]
        asked, hay = rng.sample(range(facts), questions), Haystack(source.sentences(rng))
        texts = tuple(
            Question(f" {drawn[i].question}", (drawn[i].answer.strip(" ."),), stop=(".", "\n")) for i in asked
        )
        return Draft(lambda n: hay.text(n, needles), texts, {"depth": [round(where[i], 3) for i in asked]})

    return EnglishTask("pond_facts", length, write)
