"""Completion of code whose names are defined far earlier, in other files of a repository."""

from __future__ import annotations

import random
from functools import cache
from typing import Annotated

from millpond.option_ranges import SOME_POSITIONS
from millpond_lab.evals.data.generated_task import Draft, EnglishTask, at_least, at_most
from millpond_lab.evals.data.haystack import Haystack, depths, from_book
from millpond_lab.evals.data.python_source import draw_definitions, functions, read_python
from millpond_lab.evals.sample import Question
from millpond_lab.evals.task import Task, task


@task("code")
def code(
    path: Annotated[str, "a Python file or a folder of some to fill with, instead of functions made here"] = "",
    length: Annotated[int, "tokens of context, question and answer", SOME_POSITIONS] = 4096,
    definitions: Annotated[int, "definitions in the files, of four kinds in turn", SOME_POSITIONS] = 4,
    questions: Annotated[int, "lines to complete, each by itself", SOME_POSITIONS] = 1,
) -> Task:
    """Complete a line of code with what a file far above defines: a value, a parameter, a method or a class.

    The context is source text of Python files; the line begins a new file behind it. An answer counts if the line holds
    the identifier or number. Files are read as text, and never run.
    """
    at_least("code", 1, definitions=definitions, questions=questions)
    at_most("code", "questions", questions, "definitions", definitions)
    read = cache(lambda: read_python(path))

    def write(rng: random.Random, index: int) -> Draft:
        drawn, where = draw_definitions(rng, definitions), depths(rng, definitions)
        needles = [(depth, each.told) for depth, each in zip(where, drawn, strict=True)]
        branch = random.Random(rng.getrandbits(64))
        hay = Haystack(from_book(read(), branch) if path else functions(branch), join="\n\n")
        asked = rng.sample(range(definitions), questions)
        asks = tuple(
            Question(f"\n\n# file: test_{index}.py\n{drawn[i].line}".rstrip(" "), (drawn[i].goes_on,), stop=("\n",))
            for i in asked
        )
        facts = {"depth": [round(where[i], 3) for i in asked]}
        return Draft(lambda n: f"# file: main_{index}.py\n{hay.text(n, needles)}", asks, facts)

    return EnglishTask("code", length, write)
