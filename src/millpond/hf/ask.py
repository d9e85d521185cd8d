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
    """An answer about a text, and what was held of the text when the question came.

    Attributes:
        question: Its text.
        text: Of the answer, without special tokens.
        token_ids: Of the answer, those that end it included.
        held: The cache of the text, before the question.
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
    """What a model answers to a question about a text, or to several, each on its own.

    The text is read and compressed once, before any question is known; `millpond remember` and `millpond ask` do the
    same with a file in between. Answers are greedy.

    Args:
        model: A loaded decoder, or what `load_model` takes.
        text: What the questions are about.
        question: One, or several.
        tokenizer: The model's; None: loaded from where the model comes from.
        chat: Text and question are one message of a user in the model's chat template; None: if there is one.
        chunk: Tokens that are read at a time, with a plan behind each; None: as `generate` reads.
        max_new_tokens: Of an answer, at most.
        **options: Of `compress`, such as `method`, `budget`, `codec` and `preset`; left out, nothing is evicted. A
            budget without a method is that of `LATER`.

    Raises:
        OptionError: an empty text or question, a chat template is wanted and there is none, or no tokenizer is found.
        MillpondError: what `compress` and `load_model` raise.

    Example:
        >>> text = "anna kettle " + "quiet rain past meadow and old stone on river " * 40
        >>> print(ask("pond-recall", text, "<ask> anna <is>", method="kvzip", budget="40%", max_new_tokens=2))
        anna kettle
    """
    questions = [question] if isinstance(question, str) else list(question)
    for name, given in (("text", text), *(("question", one) for one in questions)):
        if not isinstance(given, str) or not given.strip():
            raise OptionError(f"{name}={given!r}: write a text that is not empty")
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
        held, answers = cache.stats(), []
        for one in questions:
            with cache.fork() as own:
                new = answer(loaded, tokenizer, own, ids, one, in_chat, max_new_tokens)
            said = str(tokenizer.decode(new, skip_special_tokens=True)).strip()
            answers.append(TextAnswer(one, said, tuple(new), held))
    return answers[0] if isinstance(question, str) else answers


def for_later_questions(options: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `compress` for a text whose questions come later: with a budget alone the method is `LATER`."""
    alone = options.get("budget") is not None and options.get("method") is None and options.get("preset") is None
    return {**options, "method": LATER} if alone else dict(options)


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
    """Token ids of a greedy answer behind the text with ids (1, n) that `cache` has read; the cache goes on to its end.

    Args:
        streamer: Of `generate`; None: no one follows.
    """
    runs: Any = model
    ends = end_ids(model, tokenizer) if in_chat else None
    ended: dict[str, Any] = {} if ends is None else {"eos_token_id": ends}
    whole = torch.cat([ids, ending(tokenizer, question, in_chat).to(ids)], 1)
    out = runs.generate(
        whole,
        attention_mask=torch.ones_like(whole),
        **cache_argument(cache),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        streamer=streamer,
        **ended,
    )
    new: list[int] = out[0, whole.shape[1] :].tolist()
    return new


def beginning(tokenizer: PreTrainedTokenizerBase, text: str, in_chat: bool) -> Tensor:
    """Return ids of a text that questions will follow, (1, n): in a chat, the begin of the user's message."""
    if not in_chat:
        return _ids(tokenizer, text, special=True)
    return _ids(tokenizer, around_user(tokenizer).before + text, special=False)


def ending(tokenizer: PreTrainedTokenizerBase, question: str, in_chat: bool) -> Tensor:
    """Return ids of a question behind a text, (1, n): no begin of text again; in a chat, the end of the user's message."""
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
    """
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
