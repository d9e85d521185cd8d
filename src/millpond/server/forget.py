"""Parts of a chat that `millpond.forget` names: thoughts, answers of tools, messages."""

from __future__ import annotations

import re
from collections.abc import Sequence

from millpond.server.errors import ApiError
from millpond.server.message_spans import EnclosedMessages, Span, text_of
from millpond.server.messages import Message

FORGET = "millpond.forget"
_OPENS, _CLOSES = "<think>", "</think>"
_MESSAGE = re.compile(r"message:(\d{1,6})")
#: Most ids of calls that an error lists.
_LISTED = 20


def thoughts_in(text: str) -> list[Span]:
    """Where a text thinks, in characters, between its tags: these stay. A thought without an end reaches to the last.

    Example:
        >>> thoughts_in("<think>so</think>yes")
        [(7, 9)]
    """
    found: list[Span] = []
    begin = text.find(_OPENS)
    while begin >= 0:
        begin += len(_OPENS)
        end = text.find(_CLOSES, begin)
        found.append((begin, len(text) if end < 0 else end))
        begin = -1 if end < 0 else text.find(_OPENS, end)
    return found


def enclosed_forgets(names: Sequence[str], messages: Sequence[Message]) -> list[EnclosedMessages]:
    """The messages with marks at what is to be forgotten, once for each kind of piece; none where there is none.

    Raises:
        ApiError: a name of nothing in this chat, or of a message without a text.
    """
    whole = {number for name in names if (number := _number(name, messages)) is not None}
    thinks = {n for n, message in enumerate(messages) if message.role == "assistant"} if "thoughts" in names else set()
    thoughts = [thoughts_in(text_of(m)) if m.role == "assistant" else [] for m in messages]
    rest = [_behind(text_of(m), thoughts[n]) if n in whole else [] for n, m in enumerate(messages)]
    inside = [spans if n in thinks | whole else [] for n, spans in enumerate(thoughts)]
    reasons = [_all(m.reasoning_content or "") if n in thinks | whole else [] for n, m in enumerate(messages)]
    kinds = [
        (rest, EnclosedMessages(messages, rest)),
        (inside, EnclosedMessages(messages, inside, optional=True)),
        (reasons, EnclosedMessages(messages, reasons, reasoning=True, optional=True)),
    ]
    return [enclosed for pieces, enclosed in kinds if any(pieces)]


def refuse_forget(wanted: object) -> None:
    """
    Raises:
        ApiError: `millpond.forget` is given where there are no messages of a chat.
    """
    if wanted is not None:
        message = "millpond.forget names parts of a chat: use /v1/chat/completions"
        raise ApiError(400, message, "invalid_value", FORGET)


def _number(name: str, messages: Sequence[Message]) -> int | None:
    """The message that a name means; None for thoughts, which lie in several."""
    if name == "thoughts":
        return None
    calls = {m.tool_call_id: n for n, m in enumerate(messages) if m.role == "tool" and m.tool_call_id is not None}
    said = _MESSAGE.fullmatch(name)
    number = int(said[1]) if said else calls.get(name.removeprefix("tool:")) if name.startswith("tool:") else None
    if number is None or number >= len(messages):
        known = ["thoughts", *(f"tool:{call}" for call in list(calls)[:_LISTED]), "message:0"]
        there = ", ".join(known) + (f" to message:{len(messages) - 1}" if len(messages) > 1 else "")
        raise ApiError(400, f"forget: {name!r} is not in this chat; there are: {there}", "invalid_value", FORGET)
    if not (text_of(messages[number]) + (messages[number].reasoning_content or "")).strip():
        raise ApiError(400, f"forget: {name!r} is a message without a text; leave it out", "invalid_value", FORGET)
    return number


def _all(text: str) -> list[Span]:
    return [(0, len(text))] if text.strip() else []


def _behind(text: str, thoughts: Sequence[Span]) -> list[Span]:
    """What a message says behind its thoughts, of which a template may leave some out."""
    begin = min(thoughts[-1][1] + len(_CLOSES), len(text)) if thoughts else 0
    return [(begin, len(text))] if text[begin:].strip() else []
