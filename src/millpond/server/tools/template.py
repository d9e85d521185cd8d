"""A chat template's treatment of tools and calls, found by rendering it once; Hermes as text where it shows none."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from millpond.models.untrusted.render import write_chat
from millpond.server.tools.formats import ARGS, BEGIN, END, TOOL_CALLS, CallFormat, Hermes, Llama3, Mistral

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
    """Treatment of tools by a template.

    Attributes:
        tools: Whether it shows tools; if not, the server writes them and their calls into messages.
        as_text: Whether it wants arguments as JSON, not as values.
        many: Whether one message may have several calls.
        call: How it writes one; empty where it writes none.
    """

    tools: bool = False
    as_text: bool = False
    many: bool = True
    call: str = ""

    def format(self) -> CallFormat | None:
        """Return the format of its calls; None: none that is known."""
        if not self.tools:
            return Hermes()  # in which the server writes them
        call = "".join(self.call.split())
        if TOOL_CALLS in call:
            return Mistral(named=ARGS in call)
        if f"{BEGIN}{{" in call and '"arguments":' in call:
            return Hermes()
        return Llama3() if f'{{"name":"{_NAME}","parameters":' in call else None


def ask_template(tokenizer: Any) -> Shown:
    """Return what the chat template of a tokenizer does, if it has one."""
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
    """Return the template's text of messages; nothing where it refuses."""
    try:
        return write_chat(tokenizer, messages, tools=[_TOOL])
    except Exception:  # a template is a program of the model's
        return ""


def _plain_json(text: str) -> bool:
    return json.dumps(_ARGUMENTS, separators=(",", ":")) in "".join(text.split())


def in_words(messages: Iterable[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    r"""Return messages in which text replaces calls and results of tools.

    Tools are shown before the first message of the user.

    Example:
        >>> in_words([{"role": "tool", "content": "7"}], [])
        [{'role': 'user', 'content': '<tool_response>\n7\n</tool_response>'}]
    """
    result_messages: list[dict[str, Any]] = []
    results = False
    for message in messages:
        fields = {name: value for name, value in message.items() if name not in ("tool_calls", "tool_call_id")}
        calls = [_call(call["function"]) for call in message.get("tool_calls", ())]
        if calls:
            fields["content"] = "\n".join([fields["content"], *calls] if fields["content"] else calls)
        result = fields["role"] == "tool"
        if result:
            fields = {"role": "user", "content": f"<tool_response>\n{fields['content']}\n</tool_response>"}
        if result and results:  # roles alternate in many templates
            result_messages[-1]["content"] += f"\n{fields['content']}"
        else:
            result_messages.append(fields)
        results = result
    return _with_tools(result_messages, tools) if tools else result_messages


def _call(function: dict[str, Any]) -> str:
    call = {"name": function["name"], "arguments": function["arguments"]}
    return f"{BEGIN}\n{json.dumps(call, ensure_ascii=False)}\n{END}"


def _with_tools(messages: list[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    shown = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    words = (
        f"These tools can be called:\n{shown}\n\nTo call one, answer with its name and its arguments as JSON:\n"
        f'{BEGIN}\n{{"name": "...", "arguments": {{...}}}}\n{END}'
    )
    for place, message in enumerate(messages):
        if message["role"] in ("system", "developer", "user"):
            first = message | {"content": f"{words}\n\n{message['content']}"}
            return [*messages[:place], first, *messages[place + 1 :]]
    return [{"role": "system", "content": words}, *messages]
