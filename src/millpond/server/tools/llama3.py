"""Calls as Llama 3 writes them: an answer that is `{"name": "f", "parameters": {...}}`, behind `<|python_tag|>` or not.

Several calls follow one another, mostly with `; ` between them.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Sequence
from typing import Any

from millpond.server.messages import Function
from millpond.server.tools.format import Tag, call_tags, one_or_more
from millpond.server.tools.reader import Broken, Reader, Reading

MARK = "<|python_tag|>"


class Llama3Reader(Reader):
    """Objects at the beginning of the answer, or after the mark."""

    keys = ("parameters", "arguments")

    def _read(self) -> Reading[None]:
        marked = False
        while True:
            try:
                sign = yield from self._next_sign()
                if sign == MARK[0] and not marked:
                    yield from self._expect(MARK[1:])
                    sign = yield from self._next_sign()
                if sign != "{":
                    raise Broken
                yield from self._call()
                while (yield from self._another()):
                    yield from self._call()
            except Broken:
                self._give_back()
            yield from self._until(MARK)
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
    marks = (MARK,)

    def reader(self, names: Collection[str], most: int, held: bool = False) -> Reader:
        """See `CallFormat`."""
        return Llama3Reader(names, most)

    def calls(self, tools: Sequence[Function], many: bool) -> Tag:
        """See `CallFormat`."""
        return one_or_more(call_tags(tools, "", "parameters", ""), "; ", many)

    def text_and_calls(self, tools: Sequence[Function], many: bool) -> Tag:
        """See `CallFormat`; the text is none that would be read as a call."""
        text: dict[str, Any] = {"type": "any_text", "excludes": ['{"name"', MARK]}
        return {"type": "or", "elements": [self.calls(tools, many), text]}

    def new_id(self) -> str:
        """As OpenAI's look."""
        return f"call_{uuid.uuid4().hex[:24]}"
