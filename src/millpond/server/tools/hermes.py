"""Calls as Hermes and Qwen write them: `<tool_call>{"name": "f", "arguments": {...}}</tool_call>`, one or several.

Some of these models, Qwen2.5-Coder among them, leave the marks out: the answer is the JSON alone, or in a fence.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Sequence

from millpond.server.messages import MOST_CALLS, Function
from millpond.server.tools.format import Tag, call_tags, one_or_more, triggered
from millpond.server.tools.reader import Broken, Reader, Reading

BEGIN, END = "<tool_call>", "</tool_call>"
_FENCE, _LANGUAGE = "```", "json"


class HermesReader(Reader):
    """An object after each mark; where calls may lack it, those with which an answer begins too.

    Args:
        names, most: see `Reader`. unmarked: whether calls without a mark are read.
    """

    def __init__(self, names: Collection[str], most: int = MOST_CALLS, unmarked: bool = True) -> None:
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
        """Calls without a mark, as objects or arrays of them, up to what is none: text before them is no call's."""
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
        """A fence whose first character was read."""
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
        """As OpenAI's look."""
        return f"call_{uuid.uuid4().hex[:24]}"

    @staticmethod
    def _tags(tools: Sequence[Function]) -> list[Tag]:
        return call_tags(tools, f"{BEGIN}\n", "arguments", f"\n{END}")
