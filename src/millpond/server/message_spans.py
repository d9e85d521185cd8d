"""Where each message of a chat lies in what the model reads."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from millpond.server.errors import ApiError
from millpond.server.messages import Message

#: [begin, end) in characters or tokens.
Span = tuple[int, int]
FORGOTTEN, KEEP = "millpond.forgotten", "millpond.keep"


class EnclosedMessages:
    """Messages with a mark at each end of some pieces of their texts, so that these can be found behind a template.

    Args:
        pieces: of each message, [begin, end) of those of its text, in characters, one after another; None: all of it.
        reasoning: they are pieces of `reasoning_content` instead. optional: a template may leave pieces out.
        ends: only their ends are marked, so that a template may leave beginnings out, such as earlier thoughts.

    Attributes:
        messages: with the marks, inside of white space, which templates strip.
    """

    def __init__(
        self,
        messages: Sequence[Message],
        pieces: Sequence[Sequence[Span]] | None = None,
        *,
        reasoning: bool = False,
        optional: bool = False,
        ends: bool = False,
    ) -> None:
        self._reasoning, self._optional, self._ends = reasoning, optional, ends
        self._secret = secrets.token_hex(12)
        self._marked: list[bool] = []  # by piece
        every = [[(0, len(text_of(message)))] for message in messages] if pieces is None else pieces
        self.messages = [self._enclosed(message, own) for message, own in zip(messages, every, strict=True)]

    def _enclosed(self, message: Message, pieces: Sequence[Span]) -> Message:
        text = (message.reasoning_content or "") if self._reasoning else text_of(message)
        out, behind = "", 0
        for begin, end in pieces:
            piece = text[begin:end]
            if piece.strip():
                first, last = self._marks(len(self._marked))
                first = "" if self._ends else first
                inside = begin + len(piece) - len(piece.lstrip()), begin + len(piece.rstrip())
                out += text[behind : inside[0]] + first + text[slice(*inside)] + last
                behind = inside[1]
            self._marked.append(bool(piece.strip()))
        field = "reasoning_content" if self._reasoning else "content"
        return message.model_copy(update={field: out + text[behind:]}) if out else message

    def _marks(self, number: int) -> tuple[str, str]:
        return f"b{self._secret}n{number}e", f"e{self._secret}n{number}e"

    def spans(self, marked: str, text: str) -> list[Span]:
        """Where each piece lies in `text`, in characters; (0, 0) for one without a text. With `ends` a piece begins
        where the one before it ends.

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
            if self._ends:
                own, ends, rest = marked.partition(last)
                found.append((len(plain), len(plain) + len(own)) if ends else (0, 0))
                plain, marked = (plain + own, rest) if ends else (plain, marked)
                continue
            if self._optional and first not in marked and last not in marked:
                found.append((0, 0))
                continue
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


def text_of(message: Message) -> str:
    """All its text."""
    content = message.content
    return "".join(part.text for part in content) if isinstance(content, list) else content or ""


def kept_pieces(message: Message) -> list[Span]:
    """Where the parts of a message that stay lie in its text, in characters."""
    if message.millpond is not None and message.millpond.keep:
        return [(0, len(text_of(message)))]
    found, behind = [], 0
    for part in message.content if isinstance(message.content, list) else ():
        if part.millpond is not None and part.millpond.keep:
            found.append((behind, behind + len(part.text)))
        behind += len(part.text)
    return found


def refuse_keep(wanted: object, way_out: str) -> None:
    """
    Raises:
        ApiError: `millpond.keep` is given where there is no prompt of a completion.
    """
    if wanted is not None:
        message = f"millpond.keep goes with the one prompt of a completion; {way_out}"
        raise ApiError(400, message, "invalid_value", KEEP)


def refuse_forgotten(wanted: bool) -> None:
    """
    Raises:
        ApiError: `millpond.forgotten` is set where there are no messages of a chat.
    """
    if wanted:
        message = "millpond.forgotten goes with a chat, of whose messages it tells: use /v1/chat/completions"
        raise ApiError(400, message, "invalid_value", FORGOTTEN)


def token_spans(
    tokenizer: Any, text: str, special: bool, spans: Sequence[Span], field: str = FORGOTTEN
) -> tuple[list[int], list[Span]]:
    """The ids of a text, and where spans of its characters lie among them; a token that lies in part in one is of it.

    field: of the body, which asks for it.

    Raises:
        ApiError: the tokenizer does not tell which characters a token stands for.
    """
    if not getattr(tokenizer, "is_fast", False):
        message = "this model's tokenizer does not tell which characters a token stands for"
        raise ApiError(400, message, "unsupported_parameter", field)
    found = tokenizer(text, add_special_tokens=special, return_offsets_mapping=True)
    offsets = [(begin, end) for begin, end in found["offset_mapping"]]
    return list(found["input_ids"]), [_among(offsets, span) for span in spans]


def _among(offsets: Sequence[Span], span: Span) -> Span:
    """The first and behind the last of the tokens that share characters with a span."""
    own = [place for place, (begin, end) in enumerate(offsets) if begin < min(end, span[1]) and end > span[0]]
    return (own[0], own[-1] + 1) if own and span[0] < span[1] else (0, 0)


def _changed() -> ApiError:
    message = "the model's chat template leaves a message out or changes it, so where it lies is unknown"
    return ApiError(400, message, "template_error", "messages")
