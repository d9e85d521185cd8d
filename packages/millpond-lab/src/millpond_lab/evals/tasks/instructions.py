"""Several instructions in one long system message, and how many of them the answers obey."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Annotated

from millpond.option_ranges import POSITIONS, SOME_POSITIONS, Range
from millpond_lab.evals.data.answer_rules import KINDS, AnswerRule, draw_rules, obedient
from millpond_lab.evals.data.chat_form import ChatForm, ChatTask
from millpond_lab.evals.data.generated_task import Draft
from millpond_lab.evals.data.haystack import Haystack, Source, depths
from millpond_lab.evals.sample import Question
from millpond_lab.evals.task import Task, task

_INTRO = "You are an assistant who obeys every rule below, in every answer. Answers are short.\n\n"
#: What a user asks for, and four items of an answer.
_ASKED = (
    ("Name some fruits.", ("apple", "pear", "plum", "cherry")),
    ("Name some animals of the forest.", ("fox", "deer", "owl", "hare")),
    ("Which colours are bright?", ("yellow", "orange", "pink", "white")),
    ("Name some tools.", ("hammer", "saw", "file", "drill")),
    ("What can one drink?", ("water", "tea", "milk", "juice")),
    ("Name some rivers.", ("Nile", "Rhine", "Amazon", "Danube")),
    ("What lies on a desk?", ("pen", "paper", "lamp", "book")),
    ("Name some kinds of weather.", ("rain", "snow", "wind", "fog")),
    ("Which instruments are there?", ("piano", "flute", "drum", "harp")),
    ("Name some vehicles.", ("car", "train", "boat", "bus")),
)


@dataclass(frozen=True, slots=True)
class RuledQuestion(Question):
    """A question whose answer is held to rules."""

    rules: tuple[AnswerRule, ...] = ()


@task("instructions")
def instructions(
    length: Annotated[int, "tokens of system message, question and answer", SOME_POSITIONS] = 1024,
    rules: Annotated[int, "instructions in the system message, of different kinds", Range(1, len(KINDS))] = 3,
    questions: Annotated[int, "messages of the user, each by itself", Range(1, 8)] = 4,
    examples: Annotated[int, "answers that obey, which the system message shows at its end", POSITIONS] = 0,
    essay: Annotated[str, "a text file to fill with, instead of sentences made here"] = "",
) -> Task:
    """Obey the instructions of a system message that was compressed: the score is the share of them that are obeyed.

    Rules stand among notes that say nothing in particular. Each can be checked without knowing a language: a word at
    the beginning or at the end, a name that occurs, capitals, a number of parts, brackets.
    """
    source = Source("prose", essay)

    def write(form: ChatForm, rng: random.Random, index: int) -> Draft:
        own = draw_rules(rng, rng.sample(KINDS, rules))
        needles = [(depth, f"Rule: {rule.told}") for depth, rule in zip(depths(rng, rules), own, strict=True)]
        hay, asked = Haystack(source.sentences(rng)), rng.sample(_ASKED, len(_ASKED))
        shown = "".join(
            f'\n\nTo "{text}" you answer: {obedient(own, said)}' for text, said in asked[questions:][:examples]
        )
        asks = tuple(
            RuledQuestion(f"{form.system_to_user}{text}{form.user_to_assistant}", (obedient(own, said),), rules=own)
            for text, said in asked[:questions]
        )
        return Draft(
            lambda n: form.to_system + _INTRO + hay.text(n, needles) + shown,
            asks,
            {"rules": [rule.kind for rule in own]},
        )

    return ChatTask("instructions", length, write, _obeyed)


def _obeyed(question: Question, answer: str) -> float:
    assert isinstance(question, RuledQuestion)
    return sum(rule.obeyed(answer) for rule in question.rules) / len(question.rules)
