"""Chunks of a request: spans of a completion's prompt, and marked text parts of a chat."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence

from millpond.engine.chunks.prompt import Chunk, Prompt
from millpond.server.errors import ApiError
from millpond.server.messages import Message

#: Chunks of one prompt, at most.
MOST_CHUNKS = 256
_FIELD = "millpond.chunks"


def with_spans(prompt: str | Sequence[int], spans: Sequence[tuple[int, int]]) -> Prompt:
    """A prompt, cut at the spans of its chunks.

    Args:
        prompt: a text, or token ids. spans: (begin, end) of each chunk, in characters or in tokens.

    Raises:
        ApiError: spans that overlap, leave the prompt or are empty.
    """
    parts: list[str | Sequence[int] | Chunk] = []
    behind = 0
    for begin, end in sorted(spans):
        if not 0 <= begin < end <= len(prompt):
            what = "characters" if isinstance(prompt, str) else "tokens"
            message = f"chunk [{begin}, {end}] must lie in the prompt of {len(prompt)} {what} and hold one at least"
            raise ApiError(400, message, "invalid_value", _FIELD)
        if begin < behind:
            raise ApiError(400, f"chunk [{begin}, {end}] overlaps the one before it", "invalid_value", _FIELD)
        parts.append(prompt[behind:begin])
        piece = prompt[begin:end]
        parts.append(Chunk(piece if isinstance(piece, str) else tuple(piece)))
        behind = end
    parts.append(prompt[behind:])
    return Prompt([part for part in parts if isinstance(part, Chunk) or part])


def has_chunks(messages: Iterable[Message]) -> bool:
    """Whether a part of a message is marked as a chunk."""
    return any(isinstance(m.content, list) and any(part.chunk for part in m.content) for m in messages)


def refuse_spans(spans: Sequence[tuple[int, int]] | None) -> None:
    """
    Raises:
        ApiError: spans, where there is no prompt of a completion that they could lie in.
    """
    if spans is not None:
        message = 'millpond.chunks goes with the prompt of a completion; in a chat mark text parts with "chunk": true'
        raise ApiError(400, message, "invalid_value", _FIELD)


class MarkedChunks:
    """Messages whose chunks are replaced by marks, so that they can be found again behind a chat template.

    Attributes:
        messages: with a mark in place of each chunk.
    """

    def __init__(self, messages: Sequence[Message]) -> None:
        self._secret = secrets.token_hex(12)
        self._texts: list[str] = []
        self.messages = [self._marked(message) for message in messages]

    def _marked(self, message: Message) -> Message:
        if not isinstance(message.content, list):
            return message
        parts = []
        for part in message.content:
            if part.chunk and not part.text:
                raise ApiError(400, "a chunk has no text", "invalid_value", "messages")
            if part.chunk:
                self._texts.append(part.text)
            parts.append(part.model_copy(update={"text": self._mark(len(self._texts) - 1)}) if part.chunk else part)
        if len(self._texts) > MOST_CHUNKS:
            raise ApiError(400, f"a prompt may have {MOST_CHUNKS} chunks", "invalid_value", "messages")
        return message.model_copy(update={"content": parts})

    def _mark(self, number: int) -> str:
        return f"chunk{self._secret}n{number}e"

    def split(self, text: str) -> list[str | Chunk]:
        """The parts of what a template has made of the messages.

        Raises:
            ApiError: the template leaves a chunk out, repeats one or changes their order.
        """
        parts: list[str | Chunk] = []
        for number, own in enumerate(self._texts):
            before, found, text = text.partition(self._mark(number))
            if not found or self._secret in before:
                break
            parts += [before, Chunk(own)]
        if len(parts) < 2 * len(self._texts) or self._secret in text:
            message = "the model's chat template leaves a chunk out, repeats one or changes their order"
            raise ApiError(400, message, "template_error", "messages")
        return [part for part in [*parts, text] if part]
