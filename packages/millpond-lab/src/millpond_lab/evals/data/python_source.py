"""Python files of a repository: functions made here or read from a user's files, and definitions to come back to."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from millpond.errors import DataError
from millpond_lab.evals.data.data_files import read_text
from millpond_lab.evals.data.synthetic_english import words

#: Bytes of a file, and files of a folder, that are read.
MOST_BYTES, MOST_FILES = 1_000_000, 2_000
_BODIES = (
    "total = sum({a}) + len({b})\n    return total",
    "for item in {a}:\n        {b}.append(item)\n    return {b}",
    "if not {a}:\n        return None\n    return {b}.get({a})",
    "found = [each for each in {a} if each in {b}]\n    return sorted(found)",
    "with open({a}) as file:\n        {b}.update(file.read())\n    return len({b})",
)
#: Where a file is cut: at empty lines before one that is not indented.
_CUT = re.compile(r"\n{2,}(?=\S)")


@dataclass(frozen=True)
class Definition:
    """Something that a file defines, and a line elsewhere that needs it.

    Attributes:
        told: its source. line: a line up to where it must go on. goes_on: the identifier or number that follows.
    """

    told: str
    line: str
    goes_on: str


def draw_definitions(rng: random.Random, count: int) -> list[Definition]:
    """Definitions of four kinds in turn: a constant, a parameter, a method, a class in a module."""
    own = iter(words(rng, 3 * count))
    return [_definition(rng, number % 4, next(own), next(own), next(own)) for number in range(count)]


def _definition(rng: random.Random, kind: int, first: str, second: str, third: str) -> Definition:
    if kind == 0:
        value = str(rng.randint(1000, 9999))
        return Definition(f"{first.upper()}_LIMIT = {value}\n", f"assert {first.upper()}_LIMIT == ", value)
    if kind == 1:
        told = f"def open_{first}({second}, {third}):\n    return {second} + {third}\n"
        return Definition(told, f"open_{first}({second}=1, ", third)
    if kind == 2:
        told = f"class {first.capitalize()}:\n    def {second}_{third}(self):\n        return self\n"
        return Definition(told, f"{first.capitalize()}().", f"{second}_{third}")
    told = f"# file: {first}.py\n\n\nclass {second.capitalize()}{third.capitalize()}:\n    pass\n"
    return Definition(told, f"from {first} import ", f"{second.capitalize()}{third.capitalize()}")


def functions(rng: random.Random) -> Iterator[str]:
    """Functions without end, none of which is a `Definition`."""
    for turn in itertools.count():
        for name, a, b in zip(*[iter(words(rng, 300))] * 3, strict=True):
            body = rng.choice(_BODIES).format(a=a, b=b)
            yield f"def read_{name}{turn or ''}({a}, {b}):\n    {body}\n"


def read_python(path: str) -> list[str]:
    """The functions and classes of a Python file, or of those in a folder, as text; nothing of it is run.

    Raises:
        DataError: there is no file, or a file is too long, is not text, or is not a regular file.
    """
    place = Path(path).expanduser()
    files = sorted(place.rglob("*.py"))[: MOST_FILES + 1] if place.is_dir() else [place]
    if len(files) > MOST_FILES:
        raise DataError(f"{path} holds more than {MOST_FILES:,} Python files; name a folder of fewer")
    parts: list[str] = []
    for file in files:
        if file.is_file() and file.stat().st_size > MOST_BYTES:
            raise DataError(f"{file} has more than {MOST_BYTES:,} bytes; leave it out of the folder")
        parts += [part.strip("\n") + "\n" for part in _CUT.split(read_text(str(file))) if part.strip()]
    if not parts:
        raise DataError(f"{path} holds no Python source; name a .py file, or a folder of some")
    return parts
