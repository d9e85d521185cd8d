"""Formats of tool calls: Hermes and Qwen, Llama 3, and Mistral; each with its reader and the grammar of its answers."""

from __future__ import annotations

import json
import re
import secrets
import string
import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from millpond.server.messages import MAX_CALLS, MAX_NAME, Function
from millpond.server.tools.reader import Broken, Reader, Reading

#: A format of xgrammar's structural tags.
Tag = dict[str, Any]


class CallFormat(Protocol):
    """Way of a family of models to write calls.

    Attributes:
        name: Its name.
        marks: Texts that may be special tokens, and must stay in the text.
    """

    @property
    def name(self) -> str: ...

    @property
    def marks(self) -> tuple[str, ...]: ...

    def reader(self, names: Collection[str], most: int, held: bool = False) -> Reader:
        """Return a reader that takes calls of tools out of one answer.

        Args:
            names: Names of the tools.
            most: Most calls of one answer.
            held: The answer follows `calls` or `text_and_calls`, so that nothing written otherwise is a call.
        """
        ...

    def calls(self, tools: Sequence[Function], many: bool) -> Tag:
        """Return the format of an answer that is one call, or one and more."""
        ...

    def text_and_calls(self, tools: Sequence[Function], many: bool) -> Tag:
        """Return the format of an answer of text, with calls in it or without."""
        ...

    def new_id(self) -> str:
        """Return the id of a call."""
        ...


def schema_of(tool: Function) -> Tag:
    """Return the format of a tool's arguments: an object, an empty one if nothing is said.

    Raises:
        ValueError: the schema is of something else.
    """
    schema = tool.parameters or {"properties": {}, "additionalProperties": False}
    if schema.get("type", "object") != "object":
        raise ValueError(f"the parameters of {tool.name!r} must be of type 'object', not {schema['type']!r}"[:300])
    return {"type": "json_schema", "json_schema": {"type": "object"} | schema}


def call_tags(tools: Sequence[Function], before: str, key: str, after: str) -> list[Tag]:
    """Return one tag per tool: its call as an object with a name, between two texts."""
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
    """Return a tag for one of these tags; where there may be many, for more after it."""
    return {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": not many,
    }


def triggered(tags: list[Tag], mark: str, many: bool) -> Tag:
    """Return a tag for text in which each `mark` begins one of these tags."""
    return {
        "type": "triggered_tags",
        "triggers": [mark],
        "tags": tags,
        "at_least_one": False,
        "stop_after_first": not many,
    }


BEGIN, END = "<tool_call>", "</tool_call>"
_FENCE, _LANGUAGE = "```", "json"


class HermesReader(Reader):
    """Reader of an object after each mark, or without one at the beginning of an answer.

    Args:
        names: See `Reader`.
        most: See `Reader`.
        unmarked: Whether calls without a mark, with which an answer begins, are read.
    """

    def __init__(self, names: Collection[str], most: int = MAX_CALLS, unmarked: bool = True) -> None:
        self._unmarked = unmarked
        super().__init__(names, most)

    def _read(self) -> Reading[None]:
        if self._unmarked:
            yield from self._alone()
        while True:
            yield from self._until(BEGIN)
            try:
                if (yield from self._next_sign()) != "{":
                    raise Broken
                yield from self._call()
            except Broken:
                self._give_back()
            else:
                yield from self._skip(END)

    def _alone(self) -> Reading[None]:
        """Read calls without a mark, as objects or arrays of them, up to what is not a call.

        Text before them belongs to no call.
        """
        fenced = called = False
        try:
            while True:
                sign = yield from self._next_sign()
                if sign == _FENCE[0] and (called or not fenced):
                    yield from self._fence(closes=fenced)
                    fenced, called = not fenced, False
                    continue
                if sign not in "{[":
                    raise Broken
                self._after = False
                yield from self._call() if sign == "{" else self._list()
                called = True
        except Broken:
            self._give_back()

    def _fence(self, closes: bool) -> Reading[None]:
        """Read a fence whose first character was read."""
        yield from self._expect(_FENCE[1:])
        if closes:
            self._held.clear()
            return
        sign = yield from self._next()
        if sign == _LANGUAGE[0]:
            yield from self._expect(_LANGUAGE[1:])
            sign = yield from self._next()
        if sign not in " \r\n":
            raise Broken


class Hermes:
    """See `CallFormat`."""

    name = "hermes"
    marks = (BEGIN, END)

    def reader(self, names: Collection[str], most: int, held: bool = False) -> Reader:
        """See `CallFormat`."""
        return HermesReader(names, most, unmarked=not held)

    def calls(self, tools: Sequence[Function], many: bool) -> Tag:
        """See `CallFormat`."""
        return one_or_more(self._tags(tools), "\n", many)

    def text_and_calls(self, tools: Sequence[Function], many: bool) -> Tag:
        """See `CallFormat`."""
        return triggered(self._tags(tools), BEGIN, many)

    def new_id(self) -> str:
        """Return an id like OpenAI's."""
        return f"call_{uuid.uuid4().hex[:24]}"

    @staticmethod
    def _tags(tools: Sequence[Function]) -> list[Tag]:
        return call_tags(tools, f"{BEGIN}\n", "arguments", f"\n{END}")


PYTHON_TAG = "<|python_tag|>"


class Llama3Reader(Reader):
    """Objects at the beginning of the answer, or after the mark."""

    keys = ("parameters", "arguments")

    def _read(self) -> Reading[None]:
        marked = False
        while True:
            try:
                sign = yield from self._next_sign()
                if sign == PYTHON_TAG[0] and not marked:
                    yield from self._expect(PYTHON_TAG[1:])
                    sign = yield from self._next_sign()
                if sign != "{":
                    raise Broken
                yield from self._call()
                while (yield from self._another()):
                    yield from self._call()
            except Broken:
                self._give_back()
            yield from self._until(PYTHON_TAG)
            marked = True

    def _another(self) -> Reading[bool]:
        """Whether one more call follows, which is then read up to its first brace."""
        sign = yield from self._next_sign()
        if sign == ";":
            sign = yield from self._next_sign()
        if sign != "{":
            raise Broken
        self._after = False
        return True


class Llama3:
    """See `CallFormat`."""

    name = "llama3"
    marks = (PYTHON_TAG,)

    def reader(self, names: Collection[str], most: int, held: bool = False) -> Reader:
        """See `CallFormat`."""
        return Llama3Reader(names, most)

    def calls(self, tools: Sequence[Function], many: bool) -> Tag:
        """See `CallFormat`."""
        return one_or_more(call_tags(tools, "", "parameters", ""), "; ", many)

    def text_and_calls(self, tools: Sequence[Function], many: bool) -> Tag:
        """See `CallFormat`; the text is none that would be read as a call."""
        text: dict[str, Any] = {"type": "any_text", "excludes": ['{"name"', PYTHON_TAG]}
        return {"type": "or", "elements": [self.calls(tools, many), text]}

    def new_id(self) -> str:
        """Return an id like OpenAI's."""
        return f"call_{uuid.uuid4().hex[:24]}"


TOOL_CALLS, ARGS = "[TOOL_CALLS]", "[ARGS]"
_OF_NAMES = re.compile(r"[\w.:/-]")


class MistralReader(Reader):
    """A list of objects, or a name and an object, after each mark."""

    def _read(self) -> Reading[None]:
        while True:
            yield from self._until(TOOL_CALLS)
            try:
                sign = yield from self._next_sign()
                if sign == "[":
                    yield from self._list()
                else:
                    yield from self._named(sign)
            except Broken:
                self._give_back()

    def _named(self, sign: str) -> Reading[None]:
        """Read a call of which the first character was read."""
        name = ""
        while _OF_NAMES.match(sign) and len(name) < MAX_NAME:
            name += sign
            sign = yield from self._next()
        if sign == ARGS[0]:
            yield from self._expect(ARGS[1:])
            sign = yield from self._next_sign()
        if sign != "{" or name not in self._names:
            raise Broken
        yield from self._arguments(name)
        self._end()


@dataclass(frozen=True, slots=True)
class Mistral:
    """See `CallFormat`.

    Attributes:
        named: Whether answers are held to the newer way; both are read.
    """

    named: bool = False
    name: str = "mistral"
    marks: tuple[str, ...] = (TOOL_CALLS, ARGS)

    def reader(self, names: Collection[str], most: int, held: bool = False) -> Reader:
        """See `CallFormat`."""
        return MistralReader(names, most)

    def calls(self, tools: Sequence[Function], many: bool) -> Tag:
        """See `CallFormat`."""
        if self.named:
            return one_or_more(self._named_tags(tools), "", many)
        listed = one_or_more(call_tags(tools, "", "arguments", ""), ", ", many)
        return {"type": "tag", "begin": f"{TOOL_CALLS} [", "content": listed, "end": "]"}

    def text_and_calls(self, tools: Sequence[Function], many: bool) -> Tag:
        """See `CallFormat`; each call has a mark of its own."""
        tags = self._named_tags(tools) if self.named else call_tags(tools, f"{TOOL_CALLS} [", "arguments", "]")
        return triggered(tags, TOOL_CALLS, many)

    def new_id(self) -> str:
        """Return nine letters and digits: templates of these models take no other."""
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))

    @staticmethod
    def _named_tags(tools: Sequence[Function]) -> list[Tag]:
        return [
            {"type": "tag", "begin": f"{TOOL_CALLS}{tool.name}{ARGS}", "content": schema_of(tool), "end": ""}
            for tool in tools
        ]
