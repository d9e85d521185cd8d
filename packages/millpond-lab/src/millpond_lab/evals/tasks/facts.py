"""Facts hidden in texts: those of `pond-recall` and those in English prose."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Literal

from millpond.errors import OptionError
from millpond.option_ranges import SOME_POSITIONS, Range
from millpond_lab.evals.data.generated_task import Draft, EnglishTask, at_least, at_most, number
from millpond_lab.evals.data.haystack import Haystack, Source, depths
from millpond_lab.evals.data.synthetic_english import keys
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


_INTRO = "Read the text below with care. You will be asked about it.\n\n"
_GOES_ON = "Go on with the text below. You will be asked about what you write.\n\n"
#: Subjects of the facts, each of another kind: a small model confuses facts that differ in a name alone.
_NUMBERED = (
    "telephone number of the bakery",
    "serial number of the fiddle",
    "account number of the widow",
    "number on the prison door",
    "combination of the iron safe",
    "number of the lottery ticket",
    "licence number of the ferry",
    "library card number of the captain",
)
_WORDED = (
    "password of the night watchman",
    "birthday present for the doctor",
    "painting above the fireplace",
    "prize of the village fair",
    "cargo of the stolen wagon",
    "secret hidden under the floor",
    "sign above the tavern",
    "inheritance of the youngest sister",
)


@task("prose_facts")
def prose_facts(
    length: Annotated[int, "tokens of context, question and answer", SOME_POSITIONS] = 4096,
    answer: Annotated[Literal["number", "phrase"], "a number of seven digits, or a phrase of seven words"] = "number",
    facts: Annotated[int, "facts in the text, at most 8", SOME_POSITIONS] = 4,
    questions: Annotated[
        int, "how many of them are asked for, one after another in the protocol turns", SOME_POSITIONS
    ] = 1,
    essay: Annotated[str, "a text file to fill with, instead of sentences made here"] = "",
    within: Annotated[float, "share of the text, from its beginning, in which the facts stand", Range(0.0, 1.0)] = 1.0,
) -> Task:
    """Answer questions about facts in prose, each with a number or a phrase that takes several tokens.

    An answer counts if the whole number or phrase is in it. The facts of a text are of different kinds.
    """
    what, value = _checked("prose_facts", answer, facts, questions)
    source = Source("prose", essay)

    def write(rng: random.Random, index: int) -> Draft:
        return _draft(rng, rng.sample(what, facts), value, questions, Haystack(source.sentences(rng)), within)

    return EnglishTask("prose_facts", length, write)


@task("stated_facts")
def stated_facts(
    length: Annotated[int, "tokens of context, written text, question and answer", SOME_POSITIONS] = 2048,
    prompt: Annotated[float, "share of the text that is the context; the rest is written", Range(0.0, 1.0)] = 0.5,
    answer: Annotated[Literal["number", "phrase"], "a number of seven digits, or a phrase of seven words"] = "number",
    facts: Annotated[int, "facts in the written text, at most 8", SOME_POSITIONS] = 4,
    questions: Annotated[int, "how many of them are asked for, each by itself", SOME_POSITIONS] = 1,
    essay: Annotated[str, "a text file to fill with, instead of sentences made here"] = "",
) -> Task:
    """Answer questions about facts that the answer itself has stated, after its prompt was compressed.

    A text with the facts is written behind the context: it is fed token by token, as if the model had chosen each,
    so that the rule by which entries leave while decoding decides what is left of them.
    """
    what, value = _checked("stated_facts", answer, facts, questions)
    source = Source("prose", essay)

    def write(rng: random.Random, index: int) -> Draft:
        before = Haystack(source.sentences(rng))
        draft = _draft(rng, rng.sample(what, facts), value, questions, Haystack(source.sentences(rng)))

        def context(n: int) -> str:
            return f"{_GOES_ON}{before.text(int(n * prompt))}\n\n"

        def written(n: int) -> str:
            return draft.context(n - int(n * prompt)).removeprefix(_INTRO)

        return replace(draft, context=context, written=written)

    return EnglishTask("stated_facts", length, write)


def _checked(
    name: str, answer: str, facts: int, questions: int
) -> tuple[tuple[str, ...], Callable[[random.Random], str]]:
    """Subjects of facts, and what draws their values.

    Raises:
        OptionError: more facts than subjects, or more questions than facts.
    """
    what, value = (_NUMBERED, number) if answer == "number" else (_WORDED, _phrase)
    at_least(name, 1, facts=facts, questions=questions)
    at_most(name, "questions", questions, "facts", facts)
    if facts > len(what):
        raise OptionError(f"{name}: facts={facts} must be at most {len(what)}, of which each is another kind")
    return what, value


def _draft(
    rng: random.Random,
    told: list[str],
    value: Callable[[random.Random], str],
    questions: int,
    hay: Haystack,
    within: float = 1.0,
) -> Draft:
    values, where = [value(rng) for _ in told], [within * depth for depth in depths(rng, len(told))]
    needles = [(d, f"The {name} is {one}.") for d, name, one in zip(where, told, values, strict=True)]
    asked = rng.sample(range(len(told)), questions)
    texts = tuple(
        Question(f"\n\nWhat is the {told[i]}? The {told[i]} is", (values[i],), stop=(".", "\n")) for i in asked
    )
    return Draft(lambda n: _INTRO + hay.text(n, needles), texts, {"depth": [round(where[i], 3) for i in asked]})


def _phrase(rng: random.Random) -> str:
    """Two things, for example "the rusty kettle and the silent piano"."""
    first, second = (key.replace("-", " ") for key in keys(rng, 2))
    return f"the {first} and the {second}"
