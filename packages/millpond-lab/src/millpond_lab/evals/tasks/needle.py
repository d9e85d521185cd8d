"""One needle at every depth of every length: the heat map (Kamradt, 2023, "Needle in a Haystack")."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated

from millpond.errors import OptionError
from millpond.option_ranges import SOME_POSITIONS
from millpond_lab.evals.data import pond_tasks
from millpond_lab.evals.data.generated_task import Draft, GeneratedTask, at_least
from millpond_lab.evals.data.haystack import Haystack
from millpond_lab.evals.data.random_streams import number, stream
from millpond_lab.evals.data.sentence_source import Source
from millpond_lab.evals.data.synthetic_english import keys
from millpond_lab.evals.sample import Question, Sample
from millpond_lab.evals.task import Task, task


@task("needle")
def needle(
    lengths: Annotated[str, "tokens of context, question and answer, joined by +"] = "1024+2048+4096",
    depths: Annotated[int, "how many depths, evenly from the beginning to the end", SOME_POSITIONS] = 10,
    essay: Annotated[str, "a text file to fill with, instead of sentences made here"] = "",
) -> Task:
    """Find a needle at each depth of each length.

    Sample i lies at depth i mod depths of length i div depths, round and round: lengths x depths samples fill the
    heat map once.
    """
    at_least("needle", 2, depths=depths)
    sizes, source = _lengths(lengths), Source("prose", essay)

    def write(rng: random.Random, index: int) -> Draft:
        depth, length = grid.place(index)
        (key,), value, hay = keys(rng, 1), number(rng), Haystack(source.sentences(rng))
        hidden = [(depth, f"The number to remember is that of the {key}: {value}.")]
        text = f"\n\nWhich number belongs to the {key}? The number of the {key} is"
        facts = {"depth": round(depth, 3)}
        return Draft(lambda n: hay.text(n, hidden), (Question(text, (value,)),), facts, length)

    grid = _Grid("needle", max(sizes), write, english=source.english, depths=depths, sizes=tuple(sizes))
    return grid


@dataclass(frozen=True)
class _Grid(GeneratedTask):
    """Samples at the depths and lengths of a grid, in either language."""

    depths: int = 10
    sizes: tuple[int, ...] = ()

    def place(self, index: int) -> tuple[float, int]:
        """Depth and length of a sample."""
        return index % self.depths / (self.depths - 1), self.sizes[index // self.depths % len(self.sizes)]

    def in_pond(self, count: int, seed: int) -> Iterator[Sample]:
        """A single needle among varied words, at its depth."""
        for index in range(count):
            depth, length = self.place(index)
            own = stream("needle", seed, index).getrandbits(48)
            (made,) = pond_tasks.pond_samples("niah_single", 1, own, length=length, variant=2, depth=depth)
            yield replace(made, id=f"{seed}-{index}", facts={"length": length, "depth": round(depth, 3)})


def _lengths(text: str) -> list[int]:
    parts = [part.strip() for part in text.split("+")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise OptionError(f"needle: lengths={text!r} must be whole numbers above 0 joined by +, for example 1024+4096")
    return [int(part) for part in parts]
