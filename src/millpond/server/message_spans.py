"""Where messages of a chat, and pieces of them, lie in what its template makes of them."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from millpond.engine.chunks.prompt import Chunk
from millpond.prompt_marks import Span
from millpond.server.errors import ApiError
from millpond.server.messages import Message, Parts, TextPart
from millpond.server.prompt_marks import MessagePieces

#: Chunks of one prompt, at most.
MAX_CHUNKS = 256


class EnclosedMessages:
    """Messages with a mark at each end of some pieces of their texts.

    The marks locate the pieces in what a template makes of the messages.

    Args:
        messages: The messages.
        pieces: Pieces of them; None: all text of each.
        ends: Only their ends are marked, so that a template may leave beginnings out, such as earlier thoughts.

    Attributes:
        messages: Messages with the marks, inside of white space, which templates strip.
    """

    def __init__(self, messages: Sequence[Message], pieces: MessagePieces | None = None, *, ends: bool = False) -> None:
        pieces = MessagePieces([[(0, len(message.text))] for message in messages]) if pieces is None else pieces
        self._reasoning, self._optional, self._ends = pieces.in_reasoning, pieces.is_optional, ends
        self._secret = secrets.token_hex(12)
        self._marked: list[bool] = []  # by piece
        self.messages = [self._enclosed(message, spans) for message, spans in zip(messages, pieces.spans, strict=True)]

    def _enclosed(self, message: Message, pieces: Sequence[Span]) -> Message:
        text = (message.reasoning_content or "") if self._reasoning else message.text
        inserted: list[tuple[int, str]] = []
        for begin, end in pieces:
            piece = text[begin:end]
            if piece.strip():
                first, last = self._marks(len(self._marked))
                first = "" if self._ends else first
                inside = begin + len(piece) - len(piece.lstrip()), begin + len(piece.rstrip())
                inserted += [(inside[0], first), (inside[1], last)]
            self._marked.append(bool(piece.strip()))
        if not inserted:
            return message
        if self._reasoning or not message.image_urls:
            field = "reasoning_content" if self._reasoning else "content"
            return message.model_copy(update={field: _with(text, inserted)})
        return message.model_copy(update={"content": _with_parts(message, inserted)})

    def _marks(self, number: int) -> tuple[str, str]:
        return f"b{self._secret}n{number}e", f"e{self._secret}n{number}e"

    def spans(self, marked: str, text: str) -> list[Span]:
        """Return the span of each piece in `text`, in characters; (0, 0) for one without a text.

        With `ends` a piece begins where the one before it ends.

        Args:
            marked: Output of a template for `messages`.
            text: Its output for the messages as they were.

        Raises:
            ApiError: the template leaves a message out, repeats one, or makes another text of it.
        """
        spans: list[Span] = []
        plain = ""
        for number, piece in enumerate(self._marked):
            if not piece:
                spans.append((0, 0))
                continue
            first, last = self._marks(number)
            if self._ends:
                own, ends, rest = marked.partition(last)
                spans.append((len(plain), len(plain) + len(own)) if ends else (0, 0))
                plain, marked = (plain + own, rest) if ends else (plain, marked)
                continue
            if self._optional and first not in marked and last not in marked:
                spans.append((0, 0))
                continue
            before, begins, rest = marked.partition(first)
            own, ends, rest = rest.partition(last)
            if not begins or not ends:
                raise _changed()
            plain += before
            spans.append((len(plain), len(plain) + len(own)))
            plain, marked = plain + own, rest
        if plain + marked != text:
            raise _changed()
        return spans


def _with(text: str, inserted: Sequence[tuple[int, str]]) -> str:
    """Return a text with others inserted at ascending places."""
    out, behind = "", 0
    for place, other in inserted:
        out += text[behind:place] + other
        behind = place
    return out + text[behind:]


def _with_parts(message: Message, inserted: Sequence[tuple[int, str]]) -> Parts:
    """Return the parts of a message with texts inserted around pieces.

    They come in pairs; images stay.
    """
    parts: Parts = []
    begin = 0
    for part in message.content if isinstance(message.content, list) else []:
        end = begin + len(part.text)
        if isinstance(part, TextPart):
            # a mark before a piece lies before a character of its part, one behind it behind such a character
            own = [
                (place - begin, text)
                for n, (place, text) in enumerate(inserted)
                if (begin <= place < end if n % 2 == 0 else begin < place <= end)
            ]
            part = part.model_copy(update={"text": _with(part.text, own)})
        parts.append(part)
        begin = end
    return parts


class MarkedChunks:
    """Messages whose chunks are replaced by marks, which locate them after a chat template.

    Attributes:
        messages: Messages with a mark in place of each chunk.
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
        if len(self._texts) > MAX_CHUNKS:
            raise ApiError(400, f"a prompt may have {MAX_CHUNKS} chunks", "invalid_value", "messages")
        return message.model_copy(update={"content": parts})

    def _mark(self, number: int) -> str:
        return f"chunk{self._secret}n{number}e"

    def split(self, text: str) -> list[str | Chunk]:
        """Return the parts of what a template has made of the messages.

        Raises:
            ApiError: the template leaves a chunk out, repeats one or changes their order.
        """
        parts: list[str | Chunk] = []
        for number, own in enumerate(self._texts):
            before, mark, text = text.partition(self._mark(number))
            if not mark or self._secret in before:
                break
            parts += [before, Chunk(own)]
        if len(parts) < 2 * len(self._texts) or self._secret in text:
            message = "the model's chat template leaves a chunk out, repeats one or changes their order"
            raise ApiError(400, message, "template_error", "messages")
        return [part for part in [*parts, text] if part]


def _changed() -> ApiError:
    message = "the model's chat template leaves a message out or changes it, so where it lies is unknown"
    return ApiError(400, message, "template_error", "messages")
