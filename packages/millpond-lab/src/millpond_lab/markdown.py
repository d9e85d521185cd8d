"""Markdown with one sentence per line, so that a change shows as the sentence that changed."""

from __future__ import annotations

import re

ITEM = re.compile(r"( *)([*-]|\d+\.) ")
VERBATIM = re.compile(r" *(\||#|<|>|:::)")
ABBREVIATION = re.compile(r"\b(e\.g|i\.e|et al|vs|cf|etc|No|Fig|Eq|approx|[A-Z])\.$")
START = re.compile(r"[A-Z`\[*\"(0-9*_†]")
NO_START = re.compile(r"\d+\. |[*+-] ")


def one_per_line(text: str) -> str:
    """The same Markdown with each sentence of a paragraph or list item on a line of its own."""
    done: list[str] = []
    block: list[str] = []
    fenced = False

    def flush() -> None:
        if block:
            done.extend(_split_block(block))
            block.clear()

    for line in text.split("\n"):
        fence = line.lstrip().startswith("```")
        if fenced or fence or not line.strip() or VERBATIM.match(line):
            flush()
            done.append(line)
            fenced ^= fence
        elif ITEM.match(line):
            flush()
            block.append(line)
        else:
            block.append(line)
    flush()
    return "\n".join(done)


def _split_block(lines: list[str]) -> list[str]:
    """A paragraph or list item, one sentence per line; later lines are indented as the text of the first."""
    item = ITEM.match(lines[0])
    indent = len(item[0]) if item else len(lines[0]) - len(lines[0].lstrip())
    begin = item[0] if item else " " * indent
    first, *rest = sentences(" ".join([lines[0][indent:].strip(), *(line.strip() for line in lines[1:])]))
    return [begin + first, *(" " * indent + sentence for sentence in rest)]


def sentences(text: str) -> list[str]:
    """The sentences of a text; what stands in code or brackets is not split, and a heading in bold is no sentence."""
    found, begin, depth, code = [], 0, 0, False
    for i, char in enumerate(text):
        if char == "`":
            code = not code
        elif not code:
            depth = max(0, depth + (char in "([") - (char in ")]"))
            ends = char == " " and depth == 0 and re.search(r"[.!?][)\"`]*$", text[begin:i])
            begins = START.match(text[i + 1 :]) and not NO_START.match(text[i + 1 :])
            if ends and begins and not ABBREVIATION.search(text[begin:i]):
                found.append(text[begin:i])
                begin = i + 1
    return [*found, text[begin:]]
