"""LAMBADA: the last word of a passage (Paperno et al., arXiv:1606.06031)."""

from __future__ import annotations

import re
from typing import Annotated

from millpond_lab.evals.data.data_files import DataRow, FileTask, read_rows
from millpond_lab.evals.data.generated_task import TokenBudget
from millpond_lab.evals.sample import Question, Sample
from millpond_lab.evals.task import Task, task

_END_OF_SENTENCE = re.compile(r"[.!?][\"'”’)]*\s+|\n+")
_WORD = re.compile(r"[^\W_]+(?:['’-][^\W_]+)*")


@task("lambada", paper="arXiv:1606.06031")
def lambada(path: Annotated[str, "a file with text, whose last word is asked for"] = "") -> Task:
    """Say the last word of a passage. The last sentence is the question, what comes before it the context."""

    def make(row: DataRow, room: TokenBudget) -> Sample:
        before, _, last = row.words("text").rstrip().rpartition(" ")
        if not before.strip() or not _WORD.search(last):
            raise row.error("text", "must be at least two words")
        ends = [match.end() for match in _END_OF_SENTENCE.finditer(before) if before[match.end() :].strip()]
        cut = len(before[: ends[-1]].rstrip()) if ends else before.find(" ", len(before) // 2)
        context, text = (before[:cut], before[cut:]) if cut > 0 else (before, "")
        return Sample(row.name, context, (Question(text, (last,), max(8, room.tokens(f" {last}") + 4)),))

    return FileTask("lambada", lambda: read_rows(path), make, _grade)


def _grade(question: Question, answer: str) -> float:
    """1 if the first word is the right one, whatever the case and the punctuation around it."""
    first = _WORD.search(answer)
    return float(first is not None and [first.group().lower()] == _WORD.findall(question.references[0].lower())[:1])
