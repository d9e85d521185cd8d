"""MT-bench: eighty requests of two turns (Zheng et al., arXiv:2306.05685)."""

from __future__ import annotations

from typing import Annotated

from millpond.errors import DataError
from millpond_lab.evals.data.data_files import DataRow, FileTask, read_rows
from millpond_lab.evals.data.generated_task import TokenBudget
from millpond_lab.evals.sample import Question, Sample
from millpond_lab.evals.task import Task, task


@task("mt_bench", paper="arXiv:2306.05685")
def mt_bench(
    path: Annotated[str, "a file with question_id, category and turns"] = "",
    answers: Annotated[str, "a file of answers to feed, with question_id and choices[0].turns"] = "",
) -> Task:
    """How near the predictions of a conversation stay to the full cache's.

    Departs from the paper: no judge grades answers, so that no label is needed and no service is called. What is fed
    after the compressed first turn is the second request, or with `answers` the second answer, after both requests and
    the first answer.
    """

    def read() -> list[tuple[DataRow, DataRow | None]]:
        rows = read_rows(path)
        if not answers:
            return [(row, None) for row in rows]
        given = {each.whole("question_id"): each for each in read_rows(answers)}
        missing = [str(row.whole("question_id")) for row in rows if row.whole("question_id") not in given]
        if missing:
            raise DataError(f"{answers} has no answer to question_id {', '.join(missing[:5])}; name answers to {path}")
        return [(row, given[row.whole("question_id")]) for row in rows]

    def make(item: tuple[DataRow, DataRow | None], room: TokenBudget) -> Sample:
        row, answer = item
        turns = row.texts("turns")
        if len(turns) < 2:
            raise row.error("turns", "must be two requests")
        facts = {"category": row.text("category")}
        if answer is None:
            question = Question("\n\nUser:", (f" {turns[1]}",))
            return Sample(str(row.whole("question_id")), f"User: {turns[0]}", (question,), facts)
        first, second = _said(answer)
        context = f"User: {turns[0]}\n\nAssistant: {first}"
        question = Question(f"\n\nUser: {turns[1]}\n\nAssistant:", (f" {second}",))
        return Sample(str(row.whole("question_id")), context, (question,), facts)

    return FileTask("mt_bench", read, make, kind="fidelity")


def _said(row: DataRow) -> tuple[str, str]:
    """The two answers."""
    choices = row.fields.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise row.error("choices", "must be a list of at least one object with turns")
    turns = DataRow(choices[0], f"{row.path}, choices", row.number).texts("turns")
    if len(turns) < 2:
        raise row.error("choices", "must have two turns")
    return turns[0], turns[1]
