"""GSM8K: sums in words, with worked examples (Cobbe et al., arXiv:2110.14168)."""

from __future__ import annotations

import re
from typing import Annotated

from millpond.errors import DataError
from millpond.option_ranges import Range
from millpond_lab.evals.data.data_files import DataRow, FileTask, read_rows
from millpond_lab.evals.data.generated_task import TokenBudget, at_least, at_most
from millpond_lab.evals.metrics import last_number, same_number
from millpond_lab.evals.sample import Question, Sample
from millpond_lab.evals.task import Task, task

#: A calculator's note in the published answers, "<<48/2=24>>".
_NOTE = re.compile(r"<<[^<>]*>>")


@task("gsm8k", paper="arXiv:2110.14168")
def gsm8k(
    path: Annotated[str, "a file with question and answer; the result stands after ####"] = "",
    shots: Annotated[
        int, "worked examples, 0 to 8: the first rows of the file, which are then not asked", Range(0, 8)
    ] = 4,
) -> Task:
    """Work out a sum in words. The last number of the answer counts."""
    at_least("gsm8k", 0, shots=shots)
    at_most("gsm8k", "shots", shots, "the most", 8)

    def read() -> list[tuple[str, DataRow]]:
        rows = read_rows(path)
        if len(rows) <= shots:
            raise DataError(f"{path} has {len(rows)} rows, and the first {shots} are examples; lower shots")
        worked = "".join(f"Question: {row.words('question')}\nAnswer: {_worked(row)}\n\n" for row in rows[:shots])
        return [("Work out the answer, and end with the result.\n\n" + worked, row) for row in rows[shots:]]

    def make(item: tuple[str, DataRow], room: TokenBudget) -> Sample:
        before, row = item
        text = f"\n\nQuestion: {row.words('question')}\nAnswer:"
        return Sample(row.name, before.rstrip(), (Question(text, (_result(row),), 256, ("\nQuestion:", "\n\n")),))

    return FileTask("gsm8k", read, make, lambda question, answer: same_number(question.references, answer))


def _worked(row: DataRow) -> str:
    steps, _, _ = row.words("answer").partition("####")
    return f"{_NOTE.sub('', steps).strip()}\nThe result is {_result(row)}."


def _result(row: DataRow) -> str:
    _, mark, result = row.words("answer").partition("####")
    if not mark or last_number(result) is None:
        raise row.error("answer", "has no number after ####")
    return result.strip()
