"""A generation job: the requests of one HTTP request and the format of their answer."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from millpond.engine.outputs import RequestOutput
from millpond.engine.request import Request
from millpond.server.errors import ApiError


class EventWriter(Protocol):
    """Writes the events of one streamed answer, each as the text that is sent."""

    def more(self, place: int, output: RequestOutput) -> Iterator[str]:
        """What is new in the answer to prompt `place`."""
        ...

    def end(self) -> Iterator[str]:
        """All have ended."""
        ...

    def fail(self, error: ApiError) -> Iterator[str]:
        """An error ended it, when the status was long sent."""
        ...


class GenerationJob(Protocol):
    """What is to be answered, and how.

    Attributes:
        requests: one per prompt. stream: as events.
    """

    @property
    def requests(self) -> Sequence[Request]: ...

    @property
    def stream(self) -> bool: ...

    def whole(self, model: str, answers: Sequence[RequestOutput]) -> dict[str, Any]:
        """The whole answer of a model of that name; one output per prompt."""
        ...

    def events(self, model: str) -> EventWriter:
        """What writes the answer as events."""
        ...


def event_text(data: dict[str, Any], name: str | None = None) -> str:
    """A server-sent event.

    Example:
        >>> event_text({"a": 1}, "x")
        'event: x\\ndata: {"a":1}\\n\\n'
    """
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return f"data: {text}\n\n" if name is None else f"event: {name}\ndata: {text}\n\n"
