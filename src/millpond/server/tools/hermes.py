"""Calls as Hermes and Qwen write them: `<tool_call>{"name": "f", "arguments": {...}}</tool_call>`, one or several."""

from __future__ import annotations

import uuid
from collections.abc import Collection, Sequence

from millpond.server.messages import Function
from millpond.server.tools.format import Tag, call_tags, one_or_more, triggered
from millpond.server.tools.reader import Broken, Reader, Reading

BEGIN, END = "<tool_call>", "</tool_call>"


class HermesReader(Reader):
    """An object after each mark."""

    def _read(self) -> Reading[None]:
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


class Hermes:
    """See `CallFormat`."""

    name = "hermes"
    marks = (BEGIN, END)

    def reader(self, names: Collection[str], most: int) -> Reader:
        """See `CallFormat`."""
        return HermesReader(names, most)

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
