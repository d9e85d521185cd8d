"""Where each message of a chat lies in what the model reads."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from millpond.server.errors import ApiError
from millpond.server.messages import Message

#: [begin, end) in characters or tokens.
Span = tuple[int, int]


class EnclosedMessages:
    """Messages with a mark at each end of their text, so that they can be found behind a chat template.

    Attributes:
        messages: with the marks, inside of white space, which templates strip.
    """

    def __init__(self, messages: Sequence[Message]) -> None:
        self._secret = secrets.token_hex(12)
        self._marked: list[bool] = []
        self.messages = [self._enclosed(number, message) for number, message in enumerate(messages)]

    def _enclosed(self, number: int, message: Message) -> Message:
        content = message.content
        text = "".join(part.text for part in content) if isinstance(content, list) else content or ""
        self._marked.append(bool(text.strip()))
        if not text.strip():
            return message
        begin, end = len(text) - len(text.lstrip()), len(text.rstrip())
        first, last = self._marks(number)
        return message.model_copy(update={"content": text[:begin] + first + text[begin:end] + last + text[end:]})

    def _marks(self, number: int) -> tuple[str, str]:
        return f"b{self._secret}n{number}e", f"e{self._secret}n{number}e"

    def spans(self, marked: str, text: str) -> list[Span]:
        """Where each message lies in `text`, in characters; (0, 0) for one without a text.

        Args:
            marked: what a template has made of `messages`. text: what it has made of the messages as they were.

        Raises:
            ApiError: the template leaves a message out, repeats one, or makes another text of it.
        """
        found: list[Span] = []
        plain = ""
        for number, there in enumerate(self._marked):
            if not there:
                found.append((0, 0))
                continue
            first, last = self._marks(number)
            before, begins, rest = marked.partition(first)
            own, ends, rest = rest.partition(last)
            if not begins or not ends:
                raise _changed()
            plain += before
            found.append((len(plain), len(plain) + len(own)))
            plain, marked = plain + own, rest
        if plain + marked != text:
            raise _changed()
        return found


def refuse_forgotten(wanted: bool) -> None:
    """
    Raises:
        ApiError: `millpond.forgotten` is set where there are no messages of a chat.
    """
    if wanted:
        message = "millpond.forgotten goes with a chat, of whose messages it tells: use /v1/chat/completions"
        raise ApiError(400, message, "invalid_value", "millpond.forgotten")


def token_spans(tokenizer: Any, text: str, special: bool, spans: Sequence[Span]) -> tuple[list[int], list[Span]]:
    """The ids of a text, and where spans of its characters lie among them; a token that lies in part in one is of it.

    Raises:
        ApiError: the tokenizer does not tell which characters a token stands for.
    """
    if not getattr(tokenizer, "is_fast", False):
        message = "this model's tokenizer does not tell which characters a token stands for"
        raise ApiError(400, message, "unsupported_parameter", "millpond.forgotten")
    found = tokenizer(text, add_special_tokens=special, return_offsets_mapping=True)
    offsets = [(begin, end) for begin, end in found["offset_mapping"]]
    return list(found["input_ids"]), [_among(offsets, span) for span in spans]


def _among(offsets: Sequence[Span], span: Span) -> Span:
    """The first and behind the last of the tokens that share characters with a span."""
    own = [place for place, (begin, end) in enumerate(offsets) if begin < min(end, span[1]) and end > span[0]]
    return (own[0], own[-1] + 1) if own and span[0] < span[1] else (0, 0)


def _changed() -> ApiError:
    message = "the model's chat template leaves a message out or changes it, so its forgotten share is unknown"
    return ApiError(400, message, "template_error", "millpond.forgotten")
