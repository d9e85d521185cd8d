"""Questions about a text that a model reads and compresses once."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from millpond.errors import OptionError
from millpond.hf.cache import MillpondCache
from millpond.hf.compress import compress
from millpond.hf.document import read_document
from millpond.hf.stats import CacheStats
from millpond.models.cache_argument import cache_argument
from millpond.models.chat_template import around_user, end_ids, has_template
from millpond.models.load import load_model, load_tokenizer

#: Method of a budget that is given alone: questions come later, so it must not need to know them.
LATER = "kvzip"


@dataclass(frozen=True, slots=True)
class TextAnswer:
    """Answer about a text, and the cache of the text when the question came.

    Attributes:
        question: Text of the question.
        text: Text of the answer, without special tokens.
        token_ids: Ids of the answer, including those that end it.
        held: Stats of the cache of the text, before the question.
    """

    question: str
    text: str
    token_ids: tuple[int, ...]
    held: CacheStats

    @property
    def share(self) -> float:
        """Bytes that were held of the text, relative to a full cache in the model's dtype."""
        return self.held.kv_bytes / self.held.full_kv_bytes if self.held.full_kv_bytes else 1.0

    def __str__(self) -> str:
        """Return the text of the answer."""
        return self.text


@overload
def ask(
    model: PreTrainedModel | str | os.PathLike[str],
    text: str,
    question: str,
    *,
    tokenizer: PreTrainedTokenizerBase | None = ...,
    chat: bool | None = ...,
    chunk: int | None = ...,
    max_new_tokens: int = ...,
    **options: Any,
) -> TextAnswer: ...


@overload
def ask(
    model: PreTrainedModel | str | os.PathLike[str],
    text: str,
    question: Sequence[str],
    *,
    tokenizer: PreTrainedTokenizerBase | None = ...,
    chat: bool | None = ...,
    chunk: int | None = ...,
    max_new_tokens: int = ...,
    **options: Any,
) -> list[TextAnswer]: ...


def ask(
    model: PreTrainedModel | str | os.PathLike[str],
    text: str,
    question: str | Sequence[str],
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    chat: bool | None = None,
    chunk: int | None = None,
    max_new_tokens: int = 64,
    **options: Any,
) -> TextAnswer | list[TextAnswer]:
    """Answer a question about a text, or several, each on its own.

    The text is read and compressed once, before any question is known; `millpond remember` and `millpond ask` do the
    same with a file in between. Answers are greedy.

    Args:
        model: A loaded decoder, or an argument of `load_model`.
        text: Text that the questions are about.
        question: One question, or several.
        tokenizer: Tokenizer of the model; None loads that of the model's folder or repository.
        chat: Whether text and question are one message of a user in the model's chat template; None if it has one.
        chunk: Tokens that are read at a time, with a plan after each; None to read as `generate` does.
        max_new_tokens: Most tokens of an answer.
        **options: Options of `compress`, such as `method`, `budget`, `codec` and `preset`; without any, nothing is
            evicted. A budget without a method is that of `LATER`.

    Raises:
        OptionError: an empty text or question, a chat template is wanted and there is none, or no tokenizer is found.
        MillpondError: what `compress` and `load_model` raise.

    Example:
        >>> text = "anna kettle " + "quiet rain past meadow and old stone on river " * 40
        >>> print(ask("pond-recall", text, "<ask> anna <is>", method="kvzip", budget="40%", max_new_tokens=2))
        anna kettle
    """
    questions = [question] if isinstance(question, str) else list(question)
    for name, content in (("text", text), *(("question", question_text) for question_text in questions)):
        if not isinstance(content, str) or not content.strip():
            raise OptionError(f"{name}={content!r}: write a text that is not empty")
    if max_new_tokens < 1:
        raise OptionError(f"max_new_tokens={max_new_tokens} must be at least 1")
    if chunk is not None and chunk < 1:
        raise OptionError(f"chunk={chunk} must be at least 1, or None")
    loaded, tokenizer = _with_tokenizer(model, tokenizer)
    in_chat = has_template(tokenizer) if chat is None else chat
    if in_chat and not has_template(tokenizer):
        raise OptionError("chat=True: this tokenizer has no chat template; leave chat out")
    ids = beginning(tokenizer, text, in_chat).to(loaded.device)
    with compress(loaded, tokenizer=tokenizer, **for_later_questions(options)) as cache:
        read_document(loaded, cache, ids, chunk)
        text_stats, answers = cache.stats(), []
        for question_text in questions:
            with cache.fork() as fork:
                answer_ids = answer(loaded, tokenizer, fork, ids, question_text, in_chat, max_new_tokens)
            answer_text = str(tokenizer.decode(answer_ids, skip_special_tokens=True)).strip()
            answers.append(TextAnswer(question_text, answer_text, tuple(answer_ids), text_stats))
    return answers[0] if isinstance(question, str) else answers


def for_later_questions(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `compress` for a text whose questions come later.

    With a budget alone the method is `LATER`.
    """
    is_budget_alone = (
        options.get("budget") is not None and options.get("method") is None and options.get("preset") is None
    )
    return {**options, "method": LATER} if is_budget_alone else dict(options)


def answer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    cache: MillpondCache,
    ids: Tensor,
    question: str,
    in_chat: bool,
    max_new_tokens: int,
    streamer: Any = None,
) -> list[int]:
    """Return the ids of a greedy answer to a question about a text that `cache` has read.

    Args:
        model: Model of the cache.
        tokenizer: Tokenizer of the model.
        cache: Cache of the text; afterwards it holds question and answer too.
        ids: Ids of the text, (1, n).
        question: Text of the question.
        in_chat: Whether text and question are one message in the chat template.
        max_new_tokens: Most tokens of the answer.
        streamer: Streamer of `generate`; None for none.
    """
    runs: Any = model
    end_tokens = end_ids(model, tokenizer) if in_chat else None
    end_options: dict[str, Any] = {} if end_tokens is None else {"eos_token_id": end_tokens}
    prompt = torch.cat([ids, ending(tokenizer, question, in_chat).to(ids)], 1)
    out = runs.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        **cache_argument(cache),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        streamer=streamer,
        **end_options,
    )
    answer_ids: list[int] = out[0, prompt.shape[1] :].tolist()
    return answer_ids


def beginning(tokenizer: PreTrainedTokenizerBase, text: str, in_chat: bool) -> Tensor:
    """Return the ids of a text that questions will follow, (1, n).

    In a chat it is the beginning of the user's message.
    """
    if not in_chat:
        return _ids(tokenizer, text, special=True)
    return _ids(tokenizer, around_user(tokenizer).before + text, special=False)


def ending(tokenizer: PreTrainedTokenizerBase, question: str, in_chat: bool) -> Tensor:
    """Return the ids of a question after a text, (1, n), without a beginning-of-text token.

    In a chat it is the end of the user's message.
    """
    if not in_chat:
        return _ids(tokenizer, question, special=False)
    return _ids(tokenizer, f"\n\n{question}{around_user(tokenizer).behind}", special=False)


def _ids(tokenizer: PreTrainedTokenizerBase, text: str, special: bool) -> Tensor:
    inputs: Any = tokenizer(text, add_special_tokens=special, return_tensors="pt", verbose=False)
    ids: Tensor = inputs["input_ids"]
    return ids


def _with_tokenizer(
    model: PreTrainedModel | str | os.PathLike[str], tokenizer: PreTrainedTokenizerBase | None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return the model and its tokenizer, loaded if necessary.

    Raises:
        OptionError: the model does not say where it comes from.
    """
    if isinstance(model, str | os.PathLike):
        return load_model(model), load_tokenizer(model) if tokenizer is None else tokenizer
    if tokenizer is None:
        home = str(getattr(model, "name_or_path", "") or "")
        if not home:
            raise OptionError("this model does not say where it comes from: give its tokenizer (tokenizer=)")
        tokenizer = load_tokenizer(home)
    return model, tokenizer
