"""Tools and calls as text, for models whose chat template shows none, in the format of Hermes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from millpond.server.tools.hermes import BEGIN, END


def in_words(messages: Iterable[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages without calls and results of tools, which say the same; tools are shown before the first of the user's.

    Example:
        >>> in_words([{"role": "tool", "content": "7"}], [])
        [{'role': 'user', 'content': '<tool_response>\\n7\\n</tool_response>'}]
    """
    made: list[dict[str, Any]] = []
    results = False
    for message in messages:
        said = {name: value for name, value in message.items() if name not in ("tool_calls", "tool_call_id")}
        calls = [_call(call["function"]) for call in message.get("tool_calls", ())]
        if calls:
            said["content"] = "\n".join([said["content"], *calls] if said["content"] else calls)
        result = said["role"] == "tool"
        if result:
            said = {"role": "user", "content": f"<tool_response>\n{said['content']}\n</tool_response>"}
        if result and results:  # roles alternate in many templates
            made[-1]["content"] += f"\n{said['content']}"
        else:
            made.append(said)
        results = result
    return _with_tools(made, tools) if tools else made


def _call(function: dict[str, Any]) -> str:
    told = {"name": function["name"], "arguments": function["arguments"]}
    return f"{BEGIN}\n{json.dumps(told, ensure_ascii=False)}\n{END}"


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
