"""Prompts of texts and chunks, and their tokens: each part is tokenized by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from millpond.errors import OptionError


@dataclass(frozen=True, slots=True)
class Chunk:
    """A text that many prompts hold, whose keys and values a chunk store keeps.

    Attributes:
        content: A text, or its token ids.

    Raises:
        OptionError: it is empty, or neither of both.

    Example:
        >>> Chunk("The mill was sold in 1871.").content
        'The mill was sold in 1871.'
    """

    content: str | tuple[int, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.content, str):
            object.__setattr__(self, "content", _ids(self.content))
        if not self.content:
            raise OptionError("a Chunk is empty; leave it out, or give its text")


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt of consecutive parts; chunks come from the engine's chunk store if it has them.

    Each part is tokenized by itself, so that a chunk has the same tokens everywhere. Special tokens that the
    tokenizer puts before or after a text come before the first part or after the last one, unless it is token ids.

    Args:
        parts: Texts, token ids and `Chunk`s.

    Attributes:
        parts: Texts, token ids and `Chunk`s.

    Raises:
        OptionError: no part, or a part of another type.

    Example:
        >>> len(Prompt(["Answer from the texts.", Chunk("The mill was sold."), "What was sold?"]).parts)
        3
    """

    parts: tuple[str | tuple[int, ...] | Chunk, ...]

    def __init__(self, parts: Sequence[str | Sequence[int] | Chunk]) -> None:
        if isinstance(parts, str | Chunk) or not isinstance(parts, Sequence) or not parts:
            raise OptionError("a Prompt is a list of texts, token ids and Chunks, with at least one of them")
        own = tuple(part if isinstance(part, str | Chunk) else _ids(part) for part in parts)
        object.__setattr__(self, "parts", own)

    @property
    def text(self) -> str | None:
        """Text of all parts; None where one of them is token ids."""
        texts = [one for one in self.texts if isinstance(one, str)]
        return "".join(texts) if len(texts) == len(self.parts) else None

    @property
    def texts(self) -> tuple[str | tuple[int, ...], ...]:
        """Contents of all parts."""
        return tuple(part.content if isinstance(part, Chunk) else part for part in self.parts)

    @property
    def n_tokens(self) -> int:
        """Tokens of a prompt whose parts are all token ids."""
        assert not any(isinstance(text, str) for text in self.texts), "of token ids"
        return sum(map(len, self.texts))


class PromptSpan(NamedTuple):
    """A part of a prompt.

    Attributes:
        begin: Index of its first token.
        end: Index after its last token.
        is_chunk: Whether it is a chunk.
    """

    begin: int
    end: int
    is_chunk: bool


def tokenized(prompt: Prompt, tokenizer: Any) -> tuple[tuple[int, ...], list[PromptSpan]]:
    """Return the tokens of a prompt, and its parts.

    Raises:
        OptionError: a text without a tokenizer, or a chunk without a token.
    """
    ids: list[int] = []
    spans: list[PromptSpan] = []
    before, after = _special_tokens(prompt, tokenizer)
    ids += before
    for part in prompt.parts:
        content = part.content if isinstance(part, Chunk) else part
        if isinstance(content, str):
            content = (
                tuple(int(i) for i in tokenizer(content, add_special_tokens=False)["input_ids"]) if content else ()
            )
        if not content and isinstance(part, Chunk):
            raise OptionError(f"the chunk {part.content!r} has no token; leave it out")
        if content:
            spans.append(PromptSpan(len(ids), len(ids) + len(content), isinstance(part, Chunk)))
        ids += content
    return tuple([*ids, *after]), spans


def with_ids(prompt: Prompt, tokenizer: Any) -> Prompt:
    """Return the same prompt with token ids in place of texts.

    Raises:
        OptionError: as `tokenized`.
    """
    ids, spans = tokenized(prompt, tokenizer)
    parts: list[tuple[int, ...] | Chunk] = [ids[: spans[0].begin] if spans else ids]
    parts += [Chunk(ids[begin:end]) if chunk else ids[begin:end] for begin, end, chunk in spans]
    return Prompt([*parts, ids[spans[-1].end :]] if spans else parts)


def _special_tokens(prompt: Prompt, tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return the tokens that the tokenizer puts before and after a text.

    Raises:
        OptionError: a text without a tokenizer.
    """
    contents = prompt.texts
    if not any(isinstance(content, str) for content in contents):
        return [], []
    if tokenizer is None:
        raise OptionError("a prompt of texts needs a tokenizer; give token ids, or the engine its tokenizer")
    bare = list(tokenizer("a", add_special_tokens=False)["input_ids"])
    with_special = list(tokenizer("a")["input_ids"])
    begins = [i for i in range(len(with_special) - len(bare) + 1) if with_special[i : i + len(bare)] == bare]
    if not begins:
        return [], []
    before, after = with_special[: begins[0]], with_special[begins[0] + len(bare) :]
    return before if isinstance(contents[0], str) else [], after if isinstance(contents[-1], str) else []


def _ids(part: Any) -> tuple[int, ...]:
    if not isinstance(part, Sequence) or not all(isinstance(i, int) and not isinstance(i, bool) for i in part):
        raise OptionError(f"{part!r} is no part of a prompt: give a text, token ids or a Chunk")
    return tuple(part)
