"""Variable tracking, RULER's multi-hop family (Hsieh et al., arXiv:2404.06654)."""

from __future__ import annotations

import random
from typing import Annotated

from millpond.option_ranges import SOME_POSITIONS
from millpond_lab.evals.data.generated_task import Draft, GeneratedTask, at_least
from millpond_lab.evals.data.haystack import Haystack, depths
from millpond_lab.evals.data.random_streams import letters, number
from millpond_lab.evals.data.sentence_source import Source
from millpond_lab.evals.sample import Question
from millpond_lab.evals.task import Task, task

_INTRO = "Assignments to variables are hidden in the text below. Follow them as they pass a value on.\n\n"


@task("tracking", paper="arXiv:2404.06654")
def tracking(
    length: Annotated[int, "tokens of context, question and answer", SOME_POSITIONS] = 4096,
    chains: Annotated[
        int | None,
        "chains of assignments, each from a value of its own; one is asked for (1; for pond-recall 4)",
        SOME_POSITIONS,
    ] = None,
    hops: Annotated[int, "times that a value is passed on in a chain", SOME_POSITIONS] = 4,
) -> Task:
    """Name every variable that holds a value, through a chain of assignments."""
    n_chains, source = 1 if chains is None else chains, Source("noise")
    at_least("tracking", 1, chains=n_chains, hops=hops)

    def write(rng: random.Random, index: int) -> Draft:
        names = _names(rng, n_chains * (hops + 1))
        rows = [names[i::n_chains] for i in range(n_chains)]
        values = [number(rng, 5) for _ in rows]
        while len({*values}) < n_chains:
            values = [number(rng, 5) for _ in rows]
        needles = []
        for row, value in zip(rows, values, strict=True):
            holds = [value, *row[:-1]]
            steps = [f"VAR {name} = {held}." for name, held in zip(row, holds, strict=True)]
            needles += list(zip(depths(rng, hops + 1), steps, strict=True))
        asked, hay = rng.randrange(n_chains), Haystack(source.sentences(rng))
        text = (
            f"\n\nWhich {hops + 1} variables hold the value {values[asked]}, directly or through other variables? "
            f"The variables are"
        )
        return Draft(lambda n: _INTRO + hay.text(n, needles), (Question(text, tuple(rows[asked])),))

    return GeneratedTask("tracking", length, write, {"chains": chains, "hops": hops})


def _names(rng: random.Random, count: int) -> list[str]:
    names: dict[str, None] = {}
    while len(names) < count:
        names[letters(rng, 5).upper()] = None
    return list(names)
