"""Facts in a conversation, each asked for after the text was read."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from millpond.option_ranges import SOME_POSITIONS, Range
from millpond_lab.evals.data.chat_facts import KINDS, SYSTEM, ChatFact, draw_fact, paragraphs
from millpond_lab.evals.data.chat_form import ChatForm, ChatTask
from millpond_lab.evals.data.generated_task import Draft, at_most
from millpond_lab.evals.data.haystack import Haystack, depths, from_book, place
from millpond_lab.evals.data.synthetic_english import prose
from millpond_lab.evals.sample import Question
from millpond_lab.evals.stated import stated
from millpond_lab.evals.task import Task, task

#: Sentences of a paragraph where no text is named.
_SENTENCES = 5
#: Tokens of a sentence that states a fact.
_ANSWER = 40


@task("chat_facts")
def chat_facts(
    length: Annotated[int, "tokens of the conversation, question and answer", SOME_POSITIONS] = 4096,
    facts: Annotated[int, "facts in the conversation, of different kinds", Range(1, len(KINDS))] = 4,
    questions: Annotated[int, "how many of them are asked for, each by itself", SOME_POSITIONS] = 4,
    messages: Annotated[int, "user's messages in which the text comes", SOME_POSITIONS] = 1,
    begun: Annotated[bool, "each answer is begun for the model"] = False,
    essay: Annotated[str, "a text file to fill with, instead of sentences made here"] = "",
) -> Task:
    """Answer questions about a name, a date, a code, a constant in a snippet or an instruction, in a conversation.

    Facts stand among the paragraphs of the user's messages; an instruction is in the system message. The assistant says
    that it has read each message; the questions are the user's next messages.
    """
    at_most("chat_facts", "questions", questions, "facts", facts)

    def write(form: ChatForm, rng: random.Random, index: int) -> Draft:
        drawn = _distinct(rng, [KINDS[(index + kind) % len(KINDS)] for kind in range(facts)])
        told = [fact for fact in drawn if fact.told]
        needles = [(depth, fact.told) for depth, fact in zip(depths(rng, len(told)), told, strict=True)]
        hay = Haystack(_paragraphs(essay, random.Random(rng.getrandbits(64))))
        system = next((fact.system for fact in drawn if not fact.told), SYSTEM)
        asks = tuple(
            Question(form.ask(fact.question) + (fact.begins if begun else ""), (fact.states,), stop=("\n\n",))
            for fact in rng.sample(drawn, questions)
        )

        def context(n: int) -> str:
            return _conversation(form, system, place(hay.sentences(n), needles), messages)

        return Draft(context, asks, {"kind": [fact.kind for fact in drawn]}, least_answer=_ANSWER)

    return ChatTask("chat_facts", length, write, lambda question, answer: stated(question.references, answer))


def _distinct(rng: random.Random, kinds: list[str]) -> list[ChatFact]:
    """A fact of each kind; no answer is in another fact or question."""
    while True:
        drawn = [draw_fact(rng, kind) for kind in kinds]
        texts = [f"{fact.told} {fact.question} {fact.system}".lower() for fact in drawn]
        if all(sum(fact.states.lower() in text for text in texts) == 1 for fact in drawn):
            return drawn


def _paragraphs(essay: str, rng: random.Random) -> Iterator[str]:
    if essay:
        return from_book(paragraphs(Path(essay)), rng)
    sentences = prose(rng)
    return (" ".join(itertools.islice(sentences, _SENTENCES)) for _ in itertools.count())


def _conversation(form: ChatForm, system: str, told: list[str], messages: int) -> str:
    """The text in as many messages, each of which the assistant has read."""
    cuts = [len(told) * part // messages for part in range(messages + 1)]
    parts = ["\n\n".join(["Here is a part of a text.", *told[a:b]]) for a, b in itertools.pairwise(cuts)]
    begin = f"{form.to_system}{system}{form.system_to_user}{parts[0]}{form.user_to_assistant}"
    return "I have read it.".join([begin, *map(form.ask, parts[1:]), ""])
