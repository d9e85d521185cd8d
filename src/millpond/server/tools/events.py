"""Parts of an answer as a reader finds them, in their order."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Content:
    """Text that is no part of a call."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegins:
    """A call of a tool; what it is called with follows."""

    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """More of the JSON of the last call's arguments."""

    text: str


@dataclass(frozen=True, slots=True)
class CallEnds:
    """The last call is complete."""


@dataclass(frozen=True, slots=True)
class CallBreaks:
    """The last call is none, as it turns out: `text` is how the model wrote it."""

    text: str


Event = Content | CallBegins | Arguments | CallEnds | CallBreaks


@dataclass(slots=True)
class Found:
    """A whole answer: its content, and its calls as name and JSON of the arguments."""

    content: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)


def found_in(events: Iterable[Event]) -> Found:
    """What all events of an answer say together; a call that broke off is content."""
    found = Found()
    name, parts = "", list[str]()
    for event in events:
        match event:
            case Content(text) | CallBreaks(text):
                found.content += text
            case CallBegins(name):
                parts = []
            case Arguments(text):
                parts.append(text)
            case CallEnds():
                found.calls.append((name, "".join(parts)))
    return found
