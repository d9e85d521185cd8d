"""The walk of an object through Millpond's files: which functions it is passed to, and in which order."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import millpond

ROOT = str(Path(millpond.__file__).parent)


class Stay(NamedTuple):
    """A function that the object is passed to; depth: how many such functions it lies inside of."""

    file: str
    function: str
    depth: int


def walk(run: Callable[[], Any], carries: Callable[[Any], bool]) -> list[Stay]:
    """The functions of Millpond that are given what `carries` names while `run` runs, in the order of their calls."""
    stays: list[Stay] = []
    inside: list[FrameType] = []

    def watch(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(ROOT):
            names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            if any(carries(frame.f_locals.get(name)) for name in names):
                stays.append(Stay(code.co_filename[len(ROOT) + 1 :], code.co_qualname, len(inside)))
                inside.append(frame)
        elif event == "return" and inside and inside[-1] is frame:
            inside.pop()

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        run()
    finally:
        sys.setprofile(before)
    return stays


def together(walks: Iterable[list[Stay]]) -> list[Stay]:
    """Several walks as one: what is called at the same place counts once."""
    Tree = dict[tuple[str, str], Any]
    whole: Tree = {}
    for stays in walks:
        path = [whole]
        for stay in stays:
            del path[stay.depth + 1 :]
            path.append(path[-1].setdefault((stay.file, stay.function), {}))

    def flat(tree: Tree, depth: int) -> Iterator[Stay]:
        for (file, function), below in tree.items():
            yield Stay(file, function, depth)
            yield from flat(below, depth + 1)

    return list(flat(whole, 0))


def files(stays: list[Stay]) -> list[str]:
    """The files of a walk, one after the other."""
    return [stay.file for i, stay in enumerate(stays) if i == 0 or stays[i - 1].file != stay.file]


def returns(stays: list[Stay]) -> int:
    """How often the walk comes to a file that it has already left."""
    return len(files(stays)) - len(set(files(stays)))
