"""A figure from committed rows: `file path`, with arithmetic, as the marks of hand-written pages name it.

The first word is a file of `benchmarks/results` without its ending; a path says where in it the figure is:

* `rows[0].kl[1]` by place, `rows[-1]` from the end, `[0].kl` where the file is a list;
* `rows[method=h2o,budget=20%].kl` of the one row with these values, `rows[task~novel].kl` of the one with that in it,
  `load."most bytes"` where a name is no word;
* `rows[*].kl` of every row and `rows[*,method=h2o].kl` of all that fit: several figures;
* `sink.*.*` and `held.*.1` are `sink[*][*]` and `held[*][1]`, which Markdown would take for a link;
* `{other-file}rows[0].kl` in another file;
* `~` in place of the file is that of the mark before;
* `.kl` goes on from the first row of the mark before: `load rows[method=h2o].kl`, then `.bytes`.

`+ - * /`, brackets and `median mean min max sum count` put them together; of several figures each is counted on.
"""

from __future__ import annotations

import json
import lzma
import math
import operator
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

from generated.results import RESULTS

#: What a row must have: the names that lead to a value, `=` or `~` (has in it), and a text.
Condition = tuple[list[str], str, str]
#: One figure, or several of which each was reached by the same path.
Figures = float | list[float]

TOKEN = re.compile(r'\s*(?:(\d+(?:\.\d+)?)|([A-Za-z_]\w*)|"([^"]*)"|\{([^}]*)\}|([-+*/()\[\].,=~:%]))')
#: Where a path goes on from the mark before, and what it goes on from.
SHORT = re.compile(r'(?<![\w\]".])(?<!\.\*)\.(?=[A-Za-z_"])')
ROW = re.compile(r"(?:\{[^}]*\})?(?:[A-Za-z_][\w.]*)?\[[^\]]*\]")
ARITHMETIC: dict[str, Callable[[float, float], float]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
}
FUNCTIONS: dict[str, Callable[[Sequence[float]], float]] = {
    "median": statistics.median,
    "mean": statistics.fmean,
    "min": min,
    "max": max,
    "sum": math.fsum,
    "count": len,
}
#: How a file of rows may end; of a folder the summary of its evaluation is read.
ENDINGS = (".json", ".jsonl", ".json.xz", "/summary.json", "/rows.jsonl")


class FigureError(ValueError):
    """A figure's expression cannot be read, or the committed rows have no such figure."""


def is_committed(name: str) -> bool:
    """Whether the first word of a mark names committed rows."""
    return any((RESULTS / f"{name.split()[0]}{ending}").is_file() for ending in ENDINGS)


def whole(name: str, before: str) -> str:
    """The name of a mark in full, where it leaves out what the mark before it says: the file, or file and row.

    Raises:
        FigureError: no mark with a file, or with a row, is before it.
    """
    if name.startswith("~ ") and before:
        return f"{before.split()[0]} {name[2:]}"
    if not name.startswith("~ ") and not SHORT.search(name):
        return name
    row = ROW.search(before)
    if row is None:
        raise FigureError(f"{name!r} goes on from a row, and {before!r}, the mark before it, has none")
    return f"{before.split()[0]} {SHORT.sub(lambda _: f'{row[0]}.', name)}"


def row_figure(name: str) -> float:
    """The figure that a mark names, `file expression`.

    Raises:
        FigureError: no such file or place, a choice of not exactly one row, no single finite number, or an expression
            that cannot be read.
    """
    if "][" in name:
        raise FigureError("Markdown takes '][' for a link: write .* for [*] and .0 for [0]")
    file, _, expression = name.partition(" ")
    found = Expression(expression, file).value()
    if isinstance(found, list):
        raise FigureError(f"{expression!r} has {len(found)} figures; choose one with median(), mean(), min() or max()")
    if not math.isfinite(found):
        raise FigureError(f"{expression!r} is {found}")
    return found


@cache
def content(name: str) -> Any:
    """What a file of results holds; of lines of JSON the list of them."""
    for ending in ENDINGS:
        path = RESULTS / f"{name}{ending}"
        if path.is_file():
            raw = lzma.decompress(path.read_bytes()) if ending.endswith(".xz") else path.read_bytes()
            return list(map(json.loads, raw.splitlines())) if ending.endswith(".jsonl") else json.loads(raw)
    raise FigureError(f"benchmarks/results has no {name!r} ({', '.join(ENDINGS)})")


class Expression:
    """An expression over the rows of a file, read from left to right.

    Args:
        text: the expression.
        file: where a path begins that names no file.
    """

    def __init__(self, text: str, file: str) -> None:
        self.text, self.file = text, file
        self.tokens = list(tokens(text))
        self.at = 0

    def value(self) -> Figures:
        """What the whole expression comes to."""
        found = self._sum()
        if self.at < len(self.tokens):
            raise self._unreadable("an operator or the end")
        return found

    def _sum(self) -> Figures:
        found = self._product()
        while (sign := self._next("+-")) is not None:
            found = combine(sign, found, self._product())
        return found

    def _product(self) -> Figures:
        found = self._factor()
        while (sign := self._next("*/")) is not None:
            found = combine(sign, found, self._factor())
        return found

    def _factor(self) -> Figures:
        if self._next("-"):
            return combine("*", -1.0, self._factor())
        if self._next("("):
            found = self._sum()
            self._expect(")")
            return found
        kind, word = self._peek()
        if kind == "number":
            self.at += 1
            return float(word)
        if kind == "word" and word in FUNCTIONS and self._peek(1) == ("sign", "("):
            self.at += 2
            return self._applied(word)
        return self._path()

    def _applied(self, name: str) -> float:
        figures: list[float] = []
        while True:
            found = self._sum()
            figures += found if isinstance(found, list) else [found]
            if not self._next(","):
                break
        self._expect(")")
        if not figures:
            raise FigureError(f"{name}() of no figures in {self.text!r}")
        return float(FUNCTIONS[name](figures))

    def _path(self) -> Figures:
        kind, word = self._peek()
        places = [content(word if kind == "file" else self.file)]
        self.at += kind == "file"
        several = False
        if self._peek()[0] in ("word", "quoted"):
            places = [member(place, self._name()) for place in places]
        elif self._peek() != ("sign", "["):
            raise self._unreadable("a number, a path or a bracket")
        while (sign := self._next(".[")) is not None:
            if sign == "." and self._next("*"):
                places, several = [row for place in places for row in fitting(place, [])], True
            elif sign == "." and self._peek()[0] == "number":
                index = int(self._number())
                places = [item(place, index) for place in places]
            elif sign == ".":
                name = self._name()
                places = [member(place, name) for place in places]
            elif self._next("*"):
                wanted = list(self._conditions()) if self._next(",") else []
                self._expect("]")
                places, several = [row for place in places for row in fitting(place, wanted)], True
            elif self._peek()[0] == "number" or self._peek() == ("sign", "-"):
                index = -int(self._number()) if self._next("-") else int(self._number())
                self._expect("]")
                places = [item(place, index) for place in places]
            else:
                wanted = list(self._conditions())
                self._expect("]")
                places = [the_only(fitting(place, wanted), wanted) for place in places]
        figures = [number(place, self.text) for place in places]
        return figures if several else figures[0]

    def _conditions(self) -> Iterator[Condition]:
        while True:
            names = [self._name()]
            while self._next("."):
                names.append(self._name())
            sign = self._next("=~")
            if sign is None:
                raise self._unreadable("'=' or '~'")
            begin = self.at
            while self._peek() not in (("sign", ","), ("sign", "]")) and self.at < len(self.tokens):
                self.at += 1
            yield names, sign, "".join(text for _, text in self.tokens[begin : self.at])
            if not self._next(","):
                return

    def _name(self) -> str:
        return self._take("word", "quoted", what="a name")

    def _number(self) -> str:
        return self._take("number", what="a number")

    def _take(self, *kinds: str, what: str) -> str:
        kind, text = self._peek()
        if kind not in kinds:
            raise self._unreadable(what)
        self.at += 1
        return text

    def _peek(self, further: int = 0) -> tuple[str, str]:
        place = self.at + further
        return self.tokens[place] if place < len(self.tokens) else ("end", "")

    def _next(self, signs: str) -> str | None:
        kind, text = self._peek()
        if kind != "sign" or text not in signs:
            return None
        self.at += 1
        return text

    def _expect(self, sign: str) -> None:
        if self._next(sign) is None:
            raise self._unreadable(repr(sign))

    def _unreadable(self, wanted: str) -> FigureError:
        found = self._peek()[1] or "the end"
        return FigureError(f"in {self.text!r} stands {found!r} where {wanted} is expected")


def tokens(text: str) -> Iterator[tuple[str, str]]:
    """The words, numbers and signs of an expression with their kinds.

    Raises:
        FigureError: a character that no expression has.
    """
    at = 0
    while text[at:].strip():
        found = TOKEN.match(text, at)
        if not found:
            raise FigureError(f"{text!r} cannot be read from {text[at:].strip()!r} on")
        kind = ("number", "word", "quoted", "file", "sign")[(found.lastindex or 0) - 1]
        yield kind, found[found.lastindex or 0]
        at = found.end()


def combine(sign: str, left: Figures, right: Figures) -> Figures:
    """Two figures put together; of several each with its own partner, or all with one.

    Raises:
        FigureError: lists of different lengths, or a division by zero.
    """
    if isinstance(left, list) and isinstance(right, list) and len(left) != len(right):
        raise FigureError(f"{len(left)} figures {sign} {len(right)} figures: the lists differ in length")
    count = len(left) if isinstance(left, list) else len(right) if isinstance(right, list) else 1
    firsts = left if isinstance(left, list) else [left] * count
    seconds = right if isinstance(right, list) else [right] * count
    if sign == "/" and 0 in seconds:
        raise FigureError("a division by zero")
    found = [ARITHMETIC[sign](a, b) for a, b in zip(firsts, seconds, strict=True)]
    return found if isinstance(left, list) or isinstance(right, list) else found[0]


def member(place: Any, name: str) -> Any:
    """What an object has under a name.

    Raises:
        FigureError: no object, or no such name.
    """
    if not isinstance(place, dict) or name not in place:
        known = ", ".join(map(str, place)) if isinstance(place, dict) else f"it is a {type(place).__name__}"
        raise FigureError(f"no {name!r} there; {known[:300]}")
    return place[name]


def item(place: Any, index: int) -> Any:
    """What a list has at an index.

    Raises:
        FigureError: no list, or a shorter one.
    """
    if not isinstance(place, list) or not -len(place) <= index < len(place):
        size = f"a list of {len(place)}" if isinstance(place, list) else f"a {type(place).__name__}"
        raise FigureError(f"no [{index}] in {size}")
    return place[index]


def fitting(place: Any, wanted: Sequence[Condition]) -> list[Any]:
    """The rows of a list, or the values of an object, that have all wanted values.

    Raises:
        FigureError: neither a list nor an object.
    """
    if not isinstance(place, list | dict):
        raise FigureError(f"rows are chosen of a list or an object, not of a {type(place).__name__}")
    rows = list(place.values()) if isinstance(place, dict) else place
    return [row for row in rows if all(has(row, *one) for one in wanted)]


def has(row: Any, names: Sequence[str], sign: str, value: str) -> bool:
    """Whether a row has a value under a name, or under names one in the other."""
    for name in names:
        if not isinstance(row, dict) or name not in row:
            return False
        row = row[name]
    if sign == "~":
        return isinstance(row, str) and value in row
    if isinstance(row, bool) or row is None:
        return value == json.dumps(row)
    if isinstance(row, int | float):
        try:
            return float(value) == row
        except ValueError:
            return False
    return bool(row == value)


def the_only(rows: Sequence[Any], wanted: Sequence[Condition]) -> Any:
    """The one row of a choice.

    Raises:
        FigureError: no row or several.
    """
    if len(rows) != 1:
        shown = ", ".join(f"{'.'.join(names)}{sign}{value}" for names, sign, value in wanted)
        raise FigureError(f"{len(rows)} rows have {shown}; one is wanted, or [*,{shown}] for all")
    return rows[0]


def number(place: Any, text: str) -> float:
    """A place as a number.

    Raises:
        FigureError: it is none.
    """
    if isinstance(place, bool) or not isinstance(place, int | float):
        names = f" of {', '.join(map(str, place))}" if isinstance(place, dict) else ""
        raise FigureError(f"{text!r} leads to a {type(place).__name__}{names[:300]}, not to a number")
    return float(place)
