"""LongEval: lines and topics in long conversations (Li et al., 2023, "LongChat")."""

from __future__ import annotations

from typing import Annotated

from millpond_lab.evals.data.data_files import DataRow, FileTask, read_rows
from millpond_lab.evals.data.generated_task import TokenBudget
from millpond_lab.evals.metrics import found, units
from millpond_lab.evals.sample import Question, Sample
from millpond_lab.evals.task import Task, task


@task("longeval_lines")
def longeval_lines(path: Annotated[str, "a file with prompt, expected_number and num_lines"] = "") -> Task:
    """Say the number that stands in one of many lines."""

    def make(row: DataRow, room: TokenBudget) -> Sample:
        facts = {"lines": row.whole("num_lines")}
        return _sample(row, "Now the record is over", str(row.whole("expected_number")), facts)

    return FileTask("longeval_lines", lambda: read_rows(path), make, lambda q, answer: found(q.references, answer))


@task("longeval_topics")
def longeval_topics(path: Annotated[str, "a file with prompt and topics; the first is asked for"] = "") -> Task:
    """Name the first topic of a long conversation; the answer must hold its words in a row."""

    def make(row: DataRow, room: TokenBudget) -> Sample:
        topics = row.texts("topics")
        return _sample(row, "Now the record ends", topics[0], {"topics": len(topics)})

    return FileTask("longeval_topics", lambda: read_rows(path), make, _names_topic)


def _sample(row: DataRow, mark: str, answer: str, facts: dict[str, int]) -> Sample:
    """The prompt, divided where its question begins."""
    prompt = row.words("prompt")
    place = prompt.rfind(mark)
    if place < 1:
        raise row.error("prompt", f"has no {mark!r}, which is where its question begins")
    begin = len(prompt[:place].rstrip())
    return Sample(row.name, prompt[:begin], (Question(prompt[begin:].rstrip(), (answer,), 32),), dict(facts))


def _names_topic(question: Question, answer: str) -> float:
    return float(f" {' '.join(units(question.references[0]))} " in f" {' '.join(units(answer))} ")
