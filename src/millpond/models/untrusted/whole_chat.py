"""Rendering of a chat by a tokenizer's template in which no message is left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from millpond.errors import OptionError
from millpond.models.untrusted.render import write_chat

#: Roles that stand for others where a template does not know them.
STANDS_FOR = {"developer": "system"}


def write_whole(tokenizer: Any, messages: Sequence[Mapping[str, Any]], /, **how: Any) -> str:
    """Return the text that the chat template makes of messages, each of which is in it.

    A template that knows no `developer` reads it as `system`. Templates leave out what they do not know without a word;
    that is refused here.

    Args:
        tokenizer: Tokenizer with the template.
        messages: Messages of the chat.
        how: Arguments of `apply_chat_template`, and more for the template.

    Raises:
        OptionError: the template leaves out a message; its number and role are in the message. Also as `write_chat`.
    """
    copies = [dict(message) for message in messages]
    missing = left_out(tokenizer, copies, how)
    if missing:
        copies = [{**entry, "role": STANDS_FOR.get(str(entry["role"]), entry["role"])} for entry in copies]
        missing = left_out(tokenizer, copies, how)
    if missing:
        number = missing[0]
        raise OptionError(
            f"message {number + 1} has the role {messages[number]['role']!r}, and this model's chat template leaves it "
            "out of what the model reads; send its text as the user's, or take another template"
        )
    return write_chat(tokenizer, copies, **how)


def left_out(tokenizer: Any, messages: Sequence[Mapping[str, Any]], how: Mapping[str, Any]) -> list[int]:
    """Return the numbers of messages with a text that the template does not write.

    None if it refuses them itself.
    """
    marks = {number: f"zq{number}qz" for number, message in enumerate(messages) if _has_text(message)}
    shadows = [
        {**message, "content": _shadow(message["content"], marks[number])} if number in marks else dict(message)
        for number, message in enumerate(messages)
    ]
    try:
        chat_text = write_chat(tokenizer, shadows, **how)
    except Exception:  # the template is a program of the model's; what it says of the real messages counts
        return []
    return [number for number, mark in marks.items() if mark not in chat_text]


def _shadow(content: Any, mark: str) -> Any:
    """Return a content with a mark in place of its text; of parts one."""
    return mark if isinstance(content, str) else [{"type": "text", "text": mark}]


def _has_text(message: Mapping[str, Any]) -> bool:
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"text": content}]
    texts = [part.get("text") for part in parts if isinstance(part, Mapping)]
    return any(isinstance(text, str) and bool(text.strip()) for text in texts)
