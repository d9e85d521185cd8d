"""Measured figures that somebody typed into a page: numbers with a unit outside code, marks and generated parts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

NUMBER = r"(?<![\w.,^])[+\-−]?(?:\d+(?:,\d{3})*(?:\.\d+)?|\.\d+)"
UNIT = (
    r"(?:%|x\b(?! ?\d)|times\b|points\b|nats\b|[µu]s\b|ms\b|s\b|seconds?\b|minutes?\b|hours?\b"
    r"|(?:[KMG]i?B(?:/s)?|GFLOPS|TFLOPS)\b|tok(?:ens)?(?: a second|/s\b))"
)
#: `2.5 times`, `3 to 4 %`, `0.0096 ± 0.0010`, `18 of 20`, and any number with a fraction.
FIGURE = re.compile(
    rf"{NUMBER}(?:(?:(?: to | and |-|–){NUMBER})*[ -]?{UNIT}| ± {NUMBER})"
    rf"|{NUMBER} of (?:the )?\d+\b"
    r"|(?<![\w.,^/=:-])[+\-−]?\d*\.\d+(?!\w|\.\d)"
)
#: A cell of a table that is a figure alone, with a fraction or with its interval; whole numbers are counts.
CELL = re.compile(
    rf"(?<=\|) *(?:[+\-−]?[\d,]*\.\d+(?: ?{UNIT})?(?: ± {NUMBER})?(?: [(\[][^|)\]]*[)\]])?"
    rf"|{NUMBER} \({NUMBER}[^|)]*\)) *(?=\|)"
)
#: What no figure is looked for in: code, generated parts, figures with a mark, other comments and where links lead.
NOT_TEXT = re.compile(
    r"^ *```.*?^ *```|``[^`]*``|`[^`\n]*`|<!-- (?P<name>[\w -]+) -->.*?<!-- /(?P=name) -->"
    r"|<!-- \S[^>]* \S+ -->[^<]*<!-- / -->|<!--.*?-->|\]\([^)]*\)",
    re.DOTALL | re.MULTILINE,
)


class Typed(NamedTuple):
    """A figure that was typed, and where in its page."""

    begin: int
    end: int
    text: str


def text_alone(page: str) -> str:
    """A page whose code, marks and generated parts are blank, at the places where they were."""
    return NOT_TEXT.sub(lambda found: re.sub(r"[^\n|]", " ", found[0]), page)


def typed_figures(page: str) -> list[Typed]:
    """The measured figures of a page that are neither code nor generated, in their order."""
    text = text_alone(page)
    cells = [Typed(*found.span(), found[0].strip()) for found in CELL.finditer(text)]
    inside = [Typed(*found.span(), found[0]) for found in FIGURE.finditer(text)]
    alone = [one for one in inside if not any(cell.begin <= one.begin < cell.end for cell in cells)]
    return sorted([*cells, *alone])


def covered(page: str, phrases: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Where the phrases stand in a page."""
    for phrase in phrases:
        at = page.find(phrase)
        while at >= 0:
            yield at, at + len(phrase)
            at = page.find(phrase, at + 1)


def not_listed(page: str, phrases: Sequence[str]) -> list[Typed]:
    """The typed figures of a page that stand in none of the phrases."""
    places = list(covered(page, phrases))
    return [one for one in typed_figures(page) if not any(a < one.end and one.begin < b for a, b in places)]
