"""write_whole: a chat by a tokenizer's template, in which no message is left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from millpond.errors import OptionError
from millpond.models.untrusted.render import write_chat

#: Roles that stand for others where a template does not know them.
STANDS_FOR = {"developer": "system"}


def write_whole(tokenizer: Any, messages: Sequence[Mapping[str, Any]], /, **how: Any) -> str:
    """Return what the chat template makes of messages, every one of which is in it.

    A template that knows no `developer` reads it as `system`. Templates leave out what they do not know without a
    word; that is refused here.

    Args:
        how: Arguments of `apply_chat_template`, and what the template is given besides.

    Raises:
        OptionError: the template leaves out a message; its number and role are in the message. Also as `write_chat`.
    """
    said = [dict(message) for message in messages]
    missing = left_out(tokenizer, said, how)
    if missing:
        said = [{**one, "role": STANDS_FOR.get(str(one["role"]), one["role"])} for one in said]
        missing = left_out(tokenizer, said, how)
    if missing:
        number = missing[0]
        raise OptionError(
            f"message {number + 1} has the role {messages[number]['role']!r}, and this model's chat template leaves it "
            "out of what the model reads; send its text as the user's, or take another template"
        )
    return write_chat(tokenizer, said, **how)


def left_out(tokenizer: Any, messages: Sequence[Mapping[str, Any]], how: Mapping[str, Any]) -> list[int]:
    """Numbers of the messages with a text that the template does not write; none where it refuses them itself."""
    marks = {number: f"zq{number}qz" for number, one in enumerate(messages) if _has_text(one)}
    shadows = [
        {**one, "content": marks[number]} if number in marks else dict(one) for number, one in enumerate(messages)
    ]
    try:
        shown = write_chat(tokenizer, shadows, **how)
    except Exception:  # the template is a program of the model's; what it says of the real messages counts
        return []
    return [number for number, mark in marks.items() if mark not in shown]


def _has_text(message: Mapping[str, Any]) -> bool:
    content = message.get("content")
    return isinstance(content, str) and bool(content.strip())
