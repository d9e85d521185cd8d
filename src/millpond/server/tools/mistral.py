"""Calls as Mistral's models write them, in two ways.

Older ones write `[TOOL_CALLS] [{"name": "f", "arguments": {...}}, ...]`, newer ones `[TOOL_CALLS]f[ARGS]{...}`.
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from millpond.server.messages import MOST_NAME, Function
from millpond.server.tools.format import Tag, call_tags, one_or_more, schema_of, triggered
from millpond.server.tools.reader import Broken, Reader, Reading

MARK, ARGS = "[TOOL_CALLS]", "[ARGS]"
_OF_NAMES = re.compile(r"[\w.:/-]")


class MistralReader(Reader):
    """A list of objects, or a name and an object, after each mark."""

    def _read(self) -> Reading[None]:
        while True:
            yield from self._until(MARK)
            try:
                sign = yield from self._next_sign()
                if sign == "[":
                    yield from self._list()
                else:
                    yield from self._named(sign)
            except Broken:
                self._give_back()

    def _named(self, sign: str) -> Reading[None]:
        """A call of which the first character was read."""
        name = ""
        while _OF_NAMES.match(sign) and len(name) < MOST_NAME:
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
        named: whether answers are held to the newer way; both are read.
    """

    named: bool = False
    name: str = "mistral"
    marks: tuple[str, ...] = (MARK, ARGS)

    def reader(self, names: Collection[str], most: int, held: bool = False) -> Reader:
        """See `CallFormat`."""
        return MistralReader(names, most)

    def calls(self, tools: Sequence[Function], many: bool) -> Tag:
        """See `CallFormat`."""
        if self.named:
            return one_or_more(self._named_tags(tools), "", many)
        listed = one_or_more(call_tags(tools, "", "arguments", ""), ", ", many)
        return {"type": "tag", "begin": f"{MARK} [", "content": listed, "end": "]"}

    def text_and_calls(self, tools: Sequence[Function], many: bool) -> Tag:
        """See `CallFormat`; each call has a mark of its own."""
        tags = self._named_tags(tools) if self.named else call_tags(tools, f"{MARK} [", "arguments", "]")
        return triggered(tags, MARK, many)

    def new_id(self) -> str:
        """Nine letters and digits: templates of these models take no other."""
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))

    @staticmethod
    def _named_tags(tools: Sequence[Function]) -> list[Tag]:
        return [
            {"type": "tag", "begin": f"{MARK}{tool.name}{ARGS}", "content": schema_of(tool), "end": ""}
            for tool in tools
        ]
