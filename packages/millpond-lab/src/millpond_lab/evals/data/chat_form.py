"""Conversations as text: what a tokenizer's template puts around messages, and tasks that are made of messages."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from millpond.errors import OptionError
from millpond_lab.evals.data.generated_task import Draft, EnglishTask
from millpond_lab.evals.sample import Question, Sample
from millpond_lab.evals.task import Kind

#: Stand for what a system, two users and an assistant say, where a template is read.
_SAID = ("SAIDFIRST", "SAIDSECOND", "SAIDTHIRD", "SAIDFOURTH")


@dataclass(frozen=True)
class ChatForm:
    """What stands between the messages of a conversation; joined with them it is the template's own text.

    Attributes:
        to_system, to_user: before the first message. system_to_user, user_to_assistant, assistant_to_user: between one
            message and the next. user_to_answer: before the answer that is decoded, where the template can tell that
            nothing is thought first.
    """

    to_system: str
    to_user: str
    system_to_user: str
    user_to_assistant: str
    assistant_to_user: str
    user_to_answer: str

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> ChatForm:
        """The form that a tokenizer's chat template has.

        Raises:
            OptionError: there is no template, it takes no system message, or it changes or leaves out what is said.
        """
        if not getattr(tokenizer, "chat_template", None):
            raise OptionError(
                "this tokenizer has no chat template; name a model for conversations, or the task in its plain form"
            )
        system, user, assistant, last = _SAID
        talk = [("user", user), ("assistant", assistant), ("user", last)]
        to_system, after_system, after_user, after_assistant, _ = _around(tokenizer, [("system", system), *talk], _SAID)
        return cls(
            to_system,
            _around(tokenizer, talk, _SAID[1:])[0],
            after_system,
            after_user,
            after_assistant,
            _around(tokenizer, talk[:1], _SAID[1:2])[1],
        )

    def ask(self, text: str) -> str:
        """A user's message after one of the assistant, up to where the next answer begins."""
        return f"{self.assistant_to_user}{text}{self.user_to_assistant}"


def _around(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[tuple[str, str]], said: Sequence[str]
) -> tuple[str, ...]:
    """The template's text before the first message, and after each."""
    try:
        told = [{"role": role, "content": text} for role, text in messages]
        text = str(
            tokenizer.apply_chat_template(told, tokenize=False, add_generation_prompt=True, enable_thinking=False)
        )
    except (TemplateError, ValueError, TypeError) as error:
        raise OptionError(
            f"the model's chat template refuses such a conversation ({error}); name another one"
        ) from error
    parts = []
    for each in said:
        before, there, text = text.partition(each)
        if not there or each in text:
            raise OptionError("the model's chat template changes what is said in it; name another model")
        parts.append(before)
    first = parts[0]
    bos = tokenizer.bos_token
    if bos and first.startswith(bos) and tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]:
        parts[0] = first.removeprefix(bos)  # the tokenizer puts it there itself
    return (*parts, text)


@dataclass(frozen=True)
class ChatTask:
    """A generated task whose drafts are conversations; models without a chat template are refused.

    Attributes:
        name, length: as in `GeneratedTask`. grade: what an answer is worth.
        write: draws the draft of a sample, from the form, the stream of that sample and its number.
    """

    name: str
    length: int
    write: Callable[[ChatForm, random.Random, int], Draft]
    grade: Callable[[Question, str], float]

    @property
    def kind(self) -> Kind:
        return "generate"

    def samples(self, tokenizer: PreTrainedTokenizerBase, count: int, seed: int) -> Iterator[Sample]:
        """See `Task.samples`."""
        write = partial(self.write, ChatForm.of(tokenizer))
        yield from EnglishTask(self.name, self.length, write).samples(tokenizer, count, seed)

    def score(self, question: Question, answer: str) -> float:
        """See `Task.score`."""
        return self.grade(question, answer)
