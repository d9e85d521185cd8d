"""L-Eval: several instructions about one long document (An et al., arXiv:2307.11088)."""

from __future__ import annotations

from typing import Annotated

from millpond.option_ranges import POSITIONS
from millpond_lab.evals.data.data_files import DataRow, FileTask, Graded, read_rows, shortened
from millpond_lab.evals.data.generated_task import TokenBudget, at_least
from millpond_lab.evals.metrics import exact, f1, letters_chosen, normal, rouge, same_number
from millpond_lab.evals.sample import Question, Sample
from millpond_lab.evals.task import Task, task

_INTRO = "Below is a long document. Follow the instruction that comes after it.\n\nDocument:\n"
_EXAM = "Give the answer alone; where there are options, their letters."
#: The ways of L-Eval that need no judge, and how long an answer may be.
_WAYS = {"exam": 64, "f1": 128, "rouge": 512}


@task("leval", paper="arXiv:2307.11088")
def leval(
    path: Annotated[str, "a file with input, instructions, outputs and evaluation (exam, f1 or rouge)"] = "",
    max_tokens: Annotated[int, "cut the middle out of longer prompts; 0: never", POSITIONS] = 0,
) -> Task:
    """Follow the instructions about a document; all of one document are asked on one context.

    exam: the letters of a choice must be the same, or the last number, or the normalised text. f1, rouge: shared words,
    and the geometric mean of ROUGE-1, 2 and L. Rows that L-Eval gives to a judge are refused.
    """
    at_least("leval", 0, max_tokens=max_tokens)

    def make(row: DataRow, room: TokenBudget) -> Sample:
        way, asked, answers = row.text("evaluation"), row.texts("instructions"), row.texts("outputs")
        if way not in _WAYS:
            raise row.error("evaluation", f"is {way!r}, which needs a judge; this task has {', '.join(_WAYS)}")
        if len(asked) != len(answers):
            raise row.error("outputs", f"has {len(answers)} texts for {len(asked)} instructions")
        hint = f"\n{_EXAM}" if way == "exam" else ""
        questions = tuple(
            Graded(f"\n\nInstruction: {instruction}{hint}\nAnswer:", (answer,), _WAYS[way], metric=way)
            for instruction, answer in zip(asked, answers, strict=True)
        )
        room_left = max_tokens and max(max_tokens - _WAYS[way], 1)
        context = shortened(room, _INTRO + row.words("input"), [q.text for q in questions], room_left)
        return Sample(row.name, context, questions, {"evaluation": way})

    return FileTask("leval", lambda: read_rows(path), make, _grade)


def _grade(question: Question, answer: str) -> float:
    assert isinstance(question, Graded)
    if question.metric == "f1":
        return f1(question.references, answer)
    if question.metric == "rouge":
        one, two, long = rouge(question.references, answer)
        return float((one * two * long) ** (1 / 3))
    return _exam(question.references, answer)


def _exam(references: tuple[str, ...], answer: str) -> float:
    wanted = references[0].strip()
    if wanted.strip("().").isupper() and set(wanted) <= set("ABCDEFGH ,()."):
        return letters_chosen(references, answer)
    if not normal(wanted).strip("0123456789"):
        return same_number(references, answer)
    return exact(references, answer)
