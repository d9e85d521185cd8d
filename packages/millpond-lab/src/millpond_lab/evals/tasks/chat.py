"""Another task's samples as a conversation: its text is a user's first message, its questions are the next ones."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated

from transformers import PreTrainedTokenizerBase

from millpond.errors import OptionError
from millpond.option_ranges import Range
from millpond_lab.evals.data.chat_form import ChatForm
from millpond_lab.evals.data.generated_task import one_of
from millpond_lab.evals.sample import Question, Sample
from millpond_lab.evals.spec import Spec
from millpond_lab.evals.task import TASKS, Kind, Task, task

#: What the assistant says to the text, where it does not write one itself.
_READ = "I have read the text."


@task("chat")
def chat(
    of: Annotated[str, "a task that decodes answers, in quotes where it has options of its own"] = "prose_facts",
    system: Annotated[str, "a system message; empty: the template's own, if it has one"] = "",
    messages: Annotated[
        int, "of the user: 2, the text and then the question, or 1 of both, as kvpress asks", Range(1, 2)
    ] = 2,
) -> Task:
    """Another task for models of conversations, through the model's own chat template.

    The context is a user's message, which the assistant says it has read; each question is a message of its own, and
    where it ends with the beginning of an answer (what stands behind its question mark), the assistant begins with
    that. With messages=1 text and question are one message, and nothing is said between. `length` is that of the task:
    the template's marks, some fifty tokens, are added. Such a task is named
    `--tasks 'chat:of="prose_facts:length=2048:questions=4"'`.
    """
    one_of("chat", messages=messages, among=(1, 2))
    spec = Spec.parse(of)
    if spec.name == "chat":
        raise OptionError("chat: of= names a chat; name the task that shall become one")
    inner = spec.build(TASKS)
    if inner.kind != "generate":
        raise OptionError(f"chat: of={spec.name} is scored by {inner.kind}; name a task that decodes answers")
    return _Chat(inner, system, messages == 1)


@dataclass(frozen=True)
class _Chat:
    inner: Task
    system: str
    together: bool

    @property
    def kind(self) -> Kind:
        return "generate"

    def samples(self, tokenizer: PreTrainedTokenizerBase, count: int, seed: int) -> Iterator[Sample]:
        """See `Task.samples`."""
        form = ChatForm.of(tokenizer)
        head = f"{form.to_system}{self.system}{form.system_to_user}" if self.system else form.to_user
        for sample in self.inner.samples(tokenizer, count, seed):
            if self.together:
                yield _together(form, head, sample)
                continue
            context = f"{head}{sample.context}{form.user_to_assistant}{'' if sample.written else _READ}"
            yield replace(sample, context=context, questions=tuple(_asked(form, each) for each in sample.questions))

    def score(self, question: Question, answer: str) -> float:
        """See `Task.score`."""
        return self.inner.score(question, answer)


def _together(form: ChatForm, head: str, sample: Sample) -> Sample:
    if sample.written:
        raise OptionError(
            "chat: of= names a task that writes before it asks, between two messages; leave out messages=1"
        )
    asked = tuple(
        replace(question, text=f"{before}{form.user_to_answer}{lead}")
        for question in sample.questions
        for before, lead in [split(question.text)]
    )
    return replace(sample, context=f"{head}{sample.context}", questions=asked)


def _asked(form: ChatForm, question: Question) -> Question:
    asked, lead = split(question.text.strip())
    return replace(question, text=form.ask(asked) + lead)


def split(text: str) -> tuple[str, str]:
    """A question up to its mark, or to the word "Answer:" where it has none, and the beginning of an answer behind it.

    Example:
        >>> split("How deep is the pond? The pond is"), split("Repeat the passage:")
        (('How deep is the pond?', 'The pond is'), ('Repeat the passage:', ''))
        >>> split("Name its depth. Answer: It is")
        ('Name its depth.', 'Answer: It is')
    """
    found = re.match(r"(.*\?)\s+(\S.*)\Z", text, re.DOTALL) or re.match(r"(.*)\s+(Answer:.*)\Z", text, re.DOTALL)
    return (found[1], found[2]) if found else (text, "")
