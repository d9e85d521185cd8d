"""Blocks of code in the documentation, and what the page says that they print."""

from __future__ import annotations

import re
from itertools import zip_longest
from textwrap import dedent
from typing import NamedTuple

_FENCE = re.compile(r"^( *)```(\w+)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
#: What stands for any words of a line, and in a line of its own for any lines.
WILD = "..."
#: Words of an output that no reader would take for a success.
FAILURES = re.compile(r"<unk>|Traceback|\w+Error\b|Warning\b")


class Snippet(NamedTuple):
    """A block of code with the block of text that follows it at once, if one does."""

    code: str
    shown: str | None


def snippets(page: str, language: str = "python") -> list[Snippet]:
    """The blocks of a page in a language, indented ones too."""
    blocks = list(_FENCE.finditer(page))
    found = []
    for block, behind in zip_longest(blocks, blocks[1:]):
        if block[2] == language:
            follows = behind is not None and behind[2] == "text" and not page[block.end() : behind.start()].strip()
            found.append(Snippet(dedent(block[3]), dedent(behind[3]) if follows and behind is not None else None))
    return found


def outputs(page: str) -> list[str]:
    """All blocks of text of a page, outputs or not."""
    return [dedent(block[3]) for block in _FENCE.finditer(page) if block[2] == "text"]


def agrees(shown: str, printed: str) -> bool:
    """Whether something prints what a page shows."""
    lines = [
        r"(?:[^\n]*\n)*" if line.strip() == WILD else ".*?".join(map(re.escape, line.split(WILD))) + "\n"
        for line in shown.splitlines()
    ]
    return re.fullmatch("".join(lines), "".join(f"{line.rstrip()}\n" for line in printed.splitlines())) is not None
