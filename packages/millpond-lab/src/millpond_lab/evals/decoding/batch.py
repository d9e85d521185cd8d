"""Samples as tokens, and as batches: what is read in the first pass, what follows, and what is continued."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from millpond.errors import OptionError
from millpond_lab.evals.decoding.record import Protocol
from millpond_lab.evals.sample import Question, Sample
from millpond_lab.evals.task import Kind

Tokens = tuple[int, ...]
#: Share of unknown words in a context above which it is no text to the model.
MOST_UNKNOWN = 0.2


@dataclass(frozen=True, slots=True)
class EncodedQuestion:
    """A question as tokens.

    Attributes:
        index: of the question in its sample. question: as text, with its references.
        tokens: what is read between the first pass and the answer; never empty where the first pass could leave
            a token, so that the first token of an answer is predicted from what is kept.
        targets: continuations that are fed: all choices, or the one reference; empty where an answer is decoded.
    """

    index: int
    question: Question
    tokens: Tokens
    targets: tuple[Tokens, ...] = ()


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """One sequence.

    Attributes:
        sample: where it comes from. opening: the tokens of the first pass, after which a method evicts.
        asked: its questions; exactly one in the protocol `aware`.
    """

    sample: Sample
    opening: Tokens
    asked: tuple[EncodedQuestion, ...]

    def rows(self, protocol: Protocol) -> int:
        """How many sequences are decoded at once for it."""
        each = [max(1, len(asked.targets)) for asked in self.asked]
        return max(each) if protocol == "turns" else sum(each)


@dataclass(frozen=True, slots=True)
class PromptBatch:
    """Prompts that are read together."""

    protocol: Protocol
    kind: Kind
    prompts: tuple[EncodedPrompt, ...]

    def alone(self) -> list[PromptBatch]:
        """One batch for each prompt."""
        return [PromptBatch(self.protocol, self.kind, (prompt,)) for prompt in self.prompts]

    @property
    def names(self) -> list[tuple[str, int]]:
        """(sample, question) of every question in it."""
        return [(prompt.sample.id, asked.index) for prompt in self.prompts for asked in prompt.asked]


def encode(sample: Sample, tokenizer: PreTrainedTokenizerBase, kind: Kind, protocol: Protocol) -> list[EncodedPrompt]:
    """The prompts of one sample: one, or in the protocol `aware` one for each question.

    Raises:
        OptionError: the tokenizer does not know the language of the sample.
    """
    context = _context(tokenizer, sample)
    _check_known(tokenizer, sample, context)
    asked = [_asked(tokenizer, index, question, kind) for index, question in enumerate(sample.questions)]
    if protocol == "aware":
        return [_aware(sample, context, one) for one in asked]
    # without a question's tokens the last one of the context is asked instead
    bare = not asked[0].tokens if protocol == "turns" else any(not one.tokens for one in asked)
    cut = len(context) - 1 if bare and len(context) > 1 else len(context)
    led = [
        EncodedQuestion(one.index, one.question, context[cut:] + one.tokens, one.targets)
        if protocol == "agnostic" or one.index == 0
        else one
        for one in asked
    ]
    return [EncodedPrompt(sample, context[:cut], tuple(led))]


def _aware(sample: Sample, context: Tokens, asked: EncodedQuestion) -> EncodedPrompt:
    whole = context + asked.tokens
    cut = max(len(whole) - 1, 1)
    return EncodedPrompt(
        sample, whole[:cut], (EncodedQuestion(asked.index, asked.question, whole[cut:], asked.targets),)
    )


def _asked(tokenizer: PreTrainedTokenizerBase, index: int, question: Question, kind: Kind) -> EncodedQuestion:
    texts: tuple[str, ...] = ()
    if kind == "choice":
        texts = question.choices
    elif kind != "generate":
        texts = question.references[:1]
    targets = tuple(_tokens(tokenizer, text) for text in texts)
    if question.tokens is not None and texts:
        targets = (question.tokens,)
    return EncodedQuestion(index, question, _tokens(tokenizer, question.text), targets)


def _check_known(tokenizer: PreTrainedTokenizerBase, sample: Sample, context: Tokens) -> None:
    unknown = context.count(tokenizer.unk_token_id) if tokenizer.unk_token is not None else 0
    if unknown > MOST_UNKNOWN * len(context):
        raise OptionError(
            f"sample {sample.id!r}: the tokenizer knows no word for {unknown:,} of its {len(context):,} tokens; the "
            "text is in a language that this model was not made for, so a score would say nothing: choose other tasks"
        )


def _context(tokenizer: PreTrainedTokenizerBase, sample: Sample) -> Tokens:
    if sample.tokens is None:
        return _tokens(tokenizer, sample.context, special=True)
    return (*leading_tokens(tokenizer), *sample.tokens)


def leading_tokens(tokenizer: PreTrainedTokenizerBase) -> Tokens:
    """What the tokenizer puts before a text, a start mark for example."""
    marked, plain = _tokens(tokenizer, "a", special=True), _tokens(tokenizer, "a")
    place = next((i for i in range(len(marked)) if marked[i : i + len(plain)] == plain), 0)
    return marked[:place]


def _tokens(tokenizer: PreTrainedTokenizerBase, text: str, special: bool = False) -> Tokens:
    ids: list[int] = tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
    return tuple(int(token) for token in ids)


def batches(prompts: Iterable[EncodedPrompt], kind: Kind, protocol: Protocol, size: int) -> Iterator[PromptBatch]:
    """Prompts in their order, as many together as decode in at most `size` rows; one prompt is never split."""
    group: list[EncodedPrompt] = []
    for prompt in prompts:
        if group and sum(p.rows(protocol) for p in (*group, prompt)) > size:
            yield PromptBatch(protocol, kind, tuple(group))
            group = []
        group.append(prompt)
    if group:
        yield PromptBatch(protocol, kind, tuple(group))
