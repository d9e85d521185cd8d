"""Reads tool calls from a text that arrives in pieces, and the parts of an answer in their order."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Generator, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from millpond.server.messages import MAX_CALLS, arguments_of


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
    """The last call turned out not to be one: `text` is how the model wrote it."""

    text: str


Event = Content | CallBegins | Arguments | CallEnds | CallBreaks


@dataclass(slots=True)
class Piece:
    """A text of a whole answer, or a call with the JSON of its arguments.

    Attributes:
        text: The text, or the JSON.
        name: Name of the tool that is called; None: it is a text.
    """

    text: str = ""
    name: str | None = None


def pieces_of(events: Iterable[Event]) -> list[Piece]:
    """Return texts and calls of a whole answer in their order; a call that broke off is text."""
    pieces: list[Piece] = []
    call = Piece()
    for event in events:
        match event:
            case Content(text) | CallBreaks(text):
                if not pieces or pieces[-1].name is not None:
                    pieces.append(Piece())
                pieces[-1].text += text
            case CallBegins(name):
                call = Piece(name=name)
            case Arguments(text):
                call.text += text
            case CallEnds():
                pieces.append(call)
    return pieces


@dataclass(slots=True)
class Found:
    """A whole answer: its content, and its calls as name and JSON of the arguments."""

    content: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)


def found_in(events: Iterable[Event]) -> Found:
    """Return what all events of an answer say together; a call that broke off is content."""
    pieces = pieces_of(events)
    content = "".join(piece.text for piece in pieces if piece.name is None)
    return Found(content, [(piece.name, piece.text) for piece in pieces if piece.name is not None])


R = TypeVar("R")
#: A part of a parser: it is sent characters, and returns what it read.
Reading = Generator[None, str, R]

_BLANK = " \t\r\n"
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?", re.ASCII)
#: Values inside each other in arguments, and characters of a number, at most.
_MAX_DEPTH, _MAX_DIGITS = 64, 400
#: Keys that a call may have besides its arguments.
_ABOUT = frozenset({"name", "type", "id"})


class Broken(Exception):
    """The last character that was read does not continue with a call."""


class Reader(ABC):
    """Reads one answer.

    Args:
        names: Names of the tools; what calls others is content.
        most: Calls that are taken; what follows the last of them is left out.
    """

    #: What the format calls the arguments of a call.
    keys: tuple[str, ...] = ("arguments", "parameters")

    def __init__(self, names: Collection[str], most: int = MAX_CALLS) -> None:
        self._names = names
        self._left = most
        self._out: list[Event] = []
        self._text: list[str] = []  # of the last event, which grows
        self._held: list[str] = []  # read, and not yet known to be content or a call
        self._blank: list[str] = []  # content only where more of it follows
        self._begun = self._passing = self._again = self._after = self._said = self._called = False
        self._sought = ""  # the one character that text alone need be searched for
        self._kind: type[Content | Arguments] = Content
        self._parser = self._read()
        next(self._parser)

    def add(self, text: str) -> list[Event]:
        """Return the events that more text makes certain."""
        place = 0
        while place < len(text) and self._left:
            if self._sought and not self._held:
                begin = text.find(self._sought, place)
                until = len(text) if begin < 0 else begin
                self._pass_on(text[place:until])
                place = until
            if place < len(text):
                self._held.append(text[place])
                self._parser.send(text[place])
                place += 1
        if not self._left:
            self._held.clear()
        return self._taken()

    def finish(self) -> list[Event]:
        """Return the remaining events, as no more text comes."""
        if self._begun:
            self._break("".join(self._held))
        elif not self._after:
            self._pass_on("".join(self._held))
        if not self._called:
            self._put(Content, "".join(self._blank))
        return self._taken()

    @abstractmethod
    def _read(self) -> Reading[None]:
        """Read the format; the parser never ends."""

    def _taken(self) -> list[Event]:
        self._close()
        out, self._out = self._out, []
        return out

    def _put(self, kind: type[Content | Arguments], text: str) -> None:
        """Add text, as part of the last event where that is of its kind."""
        if text and (self._kind is not kind or not self._text):
            self._close()
            self._kind = kind
        self._text.append(text)

    def _close(self) -> None:
        """Close the last event: no more text follows."""
        if text := "".join(self._text):
            self._out.append(self._kind(text))
        self._text = []

    def _tell(self, event: Event) -> None:
        self._close()
        self._out.append(event)

    def _pass_on(self, text: str) -> None:
        """Append content; white space around calls is dropped."""
        inner = text.strip(_BLANK)
        begin = text.find(inner)
        self._blank.append(text[:begin] if inner else text)
        if inner:
            self._put(Content, self._blank_before() + inner)
            self._blank.append(text[begin + len(inner) :])
            self._said, self._after = True, False

    def _blank_before(self) -> str:
        """Return white space that more content turns into content."""
        blank, self._blank = "".join(self._blank), []
        return blank if self._said or not self._called else ""

    def _break(self, text: str) -> None:
        """Turn the call that has begun into content."""
        self._tell(CallBreaks(self._blank_before() + text))
        self._begun, self._said = False, True

    # what parsers are made of

    def _next(self) -> Reading[str]:
        """Return the next character, or once more the one that was put back."""
        if self._again:
            self._again = False
            return self._held[-1]
        character = yield
        if self._passing:
            self._put(Arguments, character)
        return character

    def _next_sign(self) -> Reading[str]:
        """Return the next character that is not white space."""
        while (sign := (yield from self._next())) in _BLANK:
            pass
        return sign

    def _until(self, mark: str) -> Reading[None]:
        """Pass text on up to a mark, whose first character is not in it again."""
        matched, self._sought = 0, mark[0]
        while matched < len(mark):
            character = yield from self._next()
            matched = matched + 1 if character == mark[matched] else int(character == mark[0])
            self._pass_on("".join(self._held[: len(self._held) - matched]))
            del self._held[: len(self._held) - matched]
        self._after, self._sought = False, ""

    def _expect(self, text: str) -> Reading[None]:
        for wanted in text:
            if (yield from self._next()) != wanted:
                raise Broken

    def _give_back(self) -> None:
        """Give back all but the last character that was read; that one is read again."""
        if self._passing:
            self._text.pop()
        text = "".join(self._held[:-1])
        del self._held[:-1]
        if self._begun:
            self._break(text)
        else:
            self._pass_on(text)
        self._passing = self._after = False
        self._again = True

    def _begin(self, name: str) -> None:
        self._begun = True
        self._tell(CallBegins(name))

    def _end(self) -> None:
        """Complete a call."""
        self._tell(CallEnds())
        self._held.clear()
        self._begun, self._called, self._after = False, True, True
        self._left -= 1

    def _skip(self, mark: str) -> Reading[bool]:
        """Read white space and a mark behind a call, where they stand there."""
        try:
            if (yield from self._next_sign()) != mark[0]:
                raise Broken
            yield from self._expect(mark[1:])
        except Broken:
            self._give_back()
            return False
        self._held.clear()
        return True

    def _call(self) -> Reading[None]:
        """Read a call as an object whose first character was read."""
        said: dict[str, str] = {}
        sign = yield from self._next_sign()
        while sign == '"':
            key = yield from self._string()
            if key in said or not (key in _ABOUT or key in self.keys):
                raise Broken
            yield from self._colon()
            sign = yield from self._next_sign()
            begin = len(self._held) - 1
            if key in self.keys and sign == "{" and said.get("name") is not None:
                yield from self._arguments(said["name"])
                said[key] = ""
            elif key == "name":
                said[key] = (yield from self._string()) if sign == '"' else ""
                if said[key] not in self._names:
                    raise Broken
            else:
                yield from self._value(sign, 1)
                said[key] = "".join(self._held[begin:])
            sign = yield from self._next_sign()
            if sign == ",":
                sign = yield from self._next_sign()
                if sign != '"':
                    raise Broken
        given = [key for key in self.keys if key in said]
        if sign != "}" or "name" not in said or len(given) != 1:
            raise Broken
        if not self._begun:
            arguments = _as_object(said[given[0]])
            self._begin(said["name"])
            self._put(Arguments, arguments)
        self._end()

    def _list(self) -> Reading[None]:
        """Read an array of calls, whose first bracket was read."""
        while True:
            if (yield from self._next_sign()) != "{":
                raise Broken
            self._after = False
            yield from self._call()
            sign = yield from self._next_sign()
            if sign == "]":
                self._held.clear()
                return
            if sign != ",":
                raise Broken

    def _arguments(self, name: str) -> Reading[None]:
        """Read arguments whose first brace was read, and pass them on as they arrive."""
        self._begin(name)
        self._put(Arguments, "{")
        self._passing = True
        yield from self._value("{", 1)
        self._passing = False

    # JSON

    def _value(self, sign: str, depth: int) -> Reading[None]:
        """Read a value that begins with a sign."""
        if depth > _MAX_DEPTH:
            raise Broken
        if sign == '"':
            yield from self._string()
        elif sign == "{":
            yield from self._parts("}", depth)
        elif sign == "[":
            yield from self._parts("]", depth)
        elif sign in "tfn":
            yield from self._expect({"t": "rue", "f": "alse", "n": "ull"}[sign])
        elif sign in "-0123456789":
            yield from self._number(sign)
        else:
            raise Broken

    def _parts(self, end: str, depth: int) -> Reading[None]:
        """Read the members of an object (`end` is "}") or the items of an array ("]")."""
        sign = yield from self._next_sign()
        if sign == end:
            return
        while True:
            if end == "}":
                if sign != '"':
                    raise Broken
                yield from self._string()
                yield from self._colon()
                sign = yield from self._next_sign()
            yield from self._value(sign, depth + 1)
            sign = yield from self._next_sign()
            if sign == end:
                return
            if sign != ",":
                raise Broken
            sign = yield from self._next_sign()

    def _colon(self) -> Reading[None]:
        if (yield from self._next_sign()) != ":":
            raise Broken

    def _string(self) -> Reading[str]:
        """Read a text whose first quote was read."""
        begin = len(self._held) - 1
        while (sign := (yield from self._next())) != '"':
            if sign < " ":
                raise Broken
            if sign != "\\":
                continue
            sign = yield from self._next()
            if sign == "u":
                for _ in range(4):
                    if (yield from self._next()) not in "0123456789abcdefABCDEF":
                        raise Broken
            elif sign not in '"\\/bfnrt':
                raise Broken
        return str(json.loads("".join(self._held[begin:])))

    def _number(self, sign: str) -> Reading[None]:
        """Read a number; the character after it is read again."""
        digits = ""
        while sign in "-+.eE0123456789":
            digits += sign
            if len(digits) > _MAX_DIGITS:
                raise Broken
            sign = yield from self._next()
        if not _NUMBER.fullmatch(digits):
            raise Broken
        self._again = True


def _as_object(text: str) -> str:
    """Return the JSON of arguments that came before the name, or as a text with JSON in it.

    Raises:
        Broken: no object.
    """
    try:
        if text.startswith('"'):
            text = json.loads(text)
            arguments_of(text)
    except ValueError:
        raise Broken from None
    if not text.lstrip().startswith("{"):
        raise Broken
    return text
