"""A chat template's treatment of tools and calls, found by rendering it once."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from millpond.models.untrusted.render import write_chat
from millpond.server.tools.format import CallFormat
from millpond.server.tools.hermes import BEGIN, Hermes
from millpond.server.tools.llama3 import Llama3
from millpond.server.tools.mistral import ARGS, MARK, Mistral

#: An invented tool, and a call of it; every template accepts ids of nine characters.
_NAME, _ARGUMENTS, _IDS = "find_a_mill", {"pond": "round"}, ("aaaaaaaa1", "aaaaaaaa2")
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "Find a mill.",
        "parameters": {"type": "object", "properties": {"pond": {"type": "string", "description": "Its shape."}}},
    },
}
_USER = {"role": "user", "content": "Where is it?"}


@dataclass(frozen=True, slots=True)
class Shown:
    """What a template shows.

    Attributes:
        tools: whether it shows tools; if not, the server writes them and their calls into messages.
        as_text: whether it wants arguments as JSON, not as values. many: whether one message may have several calls.
        call: how it writes one; empty where it writes none.
    """

    tools: bool = False
    as_text: bool = False
    many: bool = True
    call: str = ""

    def format(self) -> CallFormat | None:
        """The format of its calls; None: none that is known."""
        if not self.tools:
            return Hermes()  # in which the server writes them
        call = "".join(self.call.split())
        if MARK in call:
            return Mistral(named=ARGS in call)
        if f"{BEGIN}{{" in call and '"arguments":' in call:
            return Hermes()
        return Llama3() if f'{{"name":"{_NAME}","parameters":' in call else None


def ask_template(tokenizer: Any) -> Shown:
    """What the chat template of a tokenizer does, if it has one."""
    if not getattr(tokenizer, "chat_template", None):
        return Shown()
    if _NAME not in _said(tokenizer, [_USER]):
        return Shown()
    values, text = (_said(tokenizer, [_USER, _calling(1, as_text)]) for as_text in (False, True))
    as_text = _plain_json(text) and not _plain_json(values)
    call = (text if as_text else values) or text
    twice = _said(tokenizer, [_USER, _calling(2, as_text)])
    return Shown(True, as_text, twice.count(_NAME) > call.count(_NAME), call)


def _calling(count: int, as_text: bool) -> dict[str, Any]:
    arguments = json.dumps(_ARGUMENTS) if as_text else _ARGUMENTS
    calls = [
        {"id": name, "type": "function", "function": {"name": _NAME, "arguments": arguments}} for name in _IDS[:count]
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _said(tokenizer: Any, messages: list[dict[str, Any]]) -> str:
    """What the template makes of it; nothing where it refuses."""
    try:
        return write_chat(tokenizer, messages, tools=[_TOOL])
    except Exception:  # a template is a program of the model's
        return ""


def _plain_json(text: str) -> bool:
    return json.dumps(_ARGUMENTS, separators=(",", ":")) in "".join(text.split())
