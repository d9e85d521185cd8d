"""PIQA: which of two ways does a thing (Bisk et al., arXiv:1911.11641)."""

from __future__ import annotations

from typing import Annotated

from millpond_lab.evals.data.data_files import DataRow, FileTask, read_labels, read_rows
from millpond_lab.evals.data.generated_task import TokenBudget
from millpond_lab.evals.sample import Question, Sample
from millpond_lab.evals.task import Task, task


@task("piqa", paper="arXiv:1911.11641")
def piqa(
    path: Annotated[str, "a file with goal, sol1 and sol2, and label where no other file has the labels"] = "",
    labels: Annotated[str, "a file with 0 or 1 a line, a line for each row"] = "",
) -> Task:
    """Choose the likelier of two ways to reach a goal, after a question in words."""

    def read() -> list[tuple[DataRow, int]]:
        rows = read_rows(path)
        right = read_labels(labels, len(rows), 2) if labels else [_label(row) for row in rows]
        return list(zip(rows, right, strict=True))

    def make(item: tuple[DataRow, int], room: TokenBudget) -> Sample:
        row, right = item
        choices = (f" {row.words('sol1').strip()}", f" {row.words('sol2').strip()}")
        question = Question("\nAnswer:", (choices[right],), choices=choices, right=right)
        return Sample(row.name, f"Question: {row.words('goal').strip()}", (question,))

    return FileTask("piqa", read, make, kind="choice")


def _label(row: DataRow) -> int:
    label = row.whole("label") if "label" in row.fields else -1
    if label not in (0, 1):
        raise row.error("label", "must be 0 or 1, unless the labels are in a file of their own (labels=FILE)")
    return label
