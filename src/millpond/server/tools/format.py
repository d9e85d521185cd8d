"""Protocol of a format of tool calls: its reader, and the grammar of its answers."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any, Protocol

from millpond.server.messages import Function
from millpond.server.tools.reader import Reader

#: A format of xgrammar's structural tags.
Tag = dict[str, Any]


class CallFormat(Protocol):
    """How a family of models writes calls.

    Attributes:
        name: of it. marks: what may be a special token, and must stay in the text.
    """

    @property
    def name(self) -> str: ...

    @property
    def marks(self) -> tuple[str, ...]: ...

    def reader(self, names: Collection[str], most: int, held: bool = False) -> Reader:
        """What takes calls of tools of these names out of one answer.

        Args:
            held: the answer follows `calls` or `text_and_calls`, so that nothing written otherwise is a call.
        """
        ...

    def calls(self, tools: Sequence[Function], many: bool) -> Tag:
        """An answer that is one call, or one and more."""
        ...

    def text_and_calls(self, tools: Sequence[Function], many: bool) -> Tag:
        """An answer of text, with calls in it or without."""
        ...

    def new_id(self) -> str:
        """The id of a call."""
        ...


def schema_of(tool: Function) -> Tag:
    """The format of what a tool is called with: an object, an empty one where nothing is said.

    Raises:
        ValueError: the schema is of something else.
    """
    schema = tool.parameters or {"properties": {}, "additionalProperties": False}
    if schema.get("type", "object") != "object":
        raise ValueError(f"the parameters of {tool.name!r} must be of type 'object', not {schema['type']!r}"[:300])
    return {"type": "json_schema", "json_schema": {"type": "object"} | schema}


def call_tags(tools: Sequence[Function], before: str, key: str, after: str) -> list[Tag]:
    """One tag per tool: its call as an object with a name, between two texts."""
    return [
        {
            "type": "tag",
            "begin": f'{before}{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "{key}": ',
            "content": schema_of(tool),
            "end": f"}}{after}",
        }
        for tool in tools
    ]


def one_or_more(tags: list[Tag], separator: str, many: bool) -> Tag:
    """One of these tags; where there may be many, more after it."""
    return {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": not many,
    }


def triggered(tags: list[Tag], mark: str, many: bool) -> Tag:
    """Text in which each `mark` begins one of these tags."""
    return {
        "type": "triggered_tags",
        "triggers": [mark],
        "tags": tags,
        "at_least_one": False,
        "stop_after_first": not many,
    }
