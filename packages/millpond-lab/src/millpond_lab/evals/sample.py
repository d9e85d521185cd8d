"""A sample: one context, and the questions about it, as text; it knows no model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Question:
    """What follows a context, and what counts as an answer.

    Attributes:
        text: appended to the context as it is, with its own leading space or line break.
        references: accepted answers, or all the parts of one answer; the task's `score` decides which.
        max_new_tokens: most tokens that are decoded for the answer.
        stop: texts that end an answer; they do not belong to it.
        choices: continuations to choose from, for tasks scored by likelihood; empty where an answer is decoded.
        right: index of the right choice.
        tokens: of the one reference, where the task cuts texts at tokens; None where the reference is tokenized.
    """

    text: str
    references: tuple[str, ...] = ()
    max_new_tokens: int = 32
    stop: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    right: int = 0
    tokens: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """One context with its questions.

    Attributes:
        id: names the sample in its task, for ever: the same task, options, seed and tokenizer give the same text.
        context: what is compressed before a question is seen in the query-agnostic protocol.
        questions: at least one; several are turns, or independent questions on copies of one compressed context.
        tokens: of the context, where the task cuts texts at tokens; what the tokenizer puts before a text comes before
            them. None where the context is tokenized.
        facts: what the pictures group by, for example {"depth": 0.25, "length": 4096}.
        written: text that the model is made to write behind the context, a token at a time and before any question, as
            if it were its own answer: what leaves the cache while decoding is judged by what it said there.
    """

    id: str
    context: str
    questions: tuple[Question, ...]
    facts: dict[str, Any] = field(default_factory=dict)
    tokens: tuple[int, ...] | None = None
    written: str = ""
