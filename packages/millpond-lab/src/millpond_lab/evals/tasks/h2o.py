"""The prompts with which H2O was evaluated, in its own files (Zhang et al., arXiv:2306.14048)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Annotated

from millpond.errors import DataError
from millpond.option_ranges import SOME_POSITIONS
from millpond_lab.evals.data.data_files import DataRow, FileTask, read_labels, read_rows
from millpond_lab.evals.data.generated_task import TokenBudget, at_least
from millpond_lab.evals.metrics import rouge
from millpond_lab.evals.sample import Question, Sample
from millpond_lab.evals.task import Kind, Task, task

#: Rows that belong to one question, and the index of the right one where it is known.
Group = tuple[tuple[DataRow, ...], int | None]


@task("h2o_choice", paper="arXiv:2306.14048")
def h2o_choice(
    path: Annotated[str, "a file with a prompt per choice: examples, a blank line, question and choice"] = "",
    choices: Annotated[
        int, "choices of a question, in rows one after another (COPA 2, OpenBookQA 4)", SOME_POSITIONS
    ] = 2,
    labels: Annotated[str, "a file with the index of the right choice, from 0, a line for each question"] = "",
) -> Task:
    """COPA and OpenBookQA with five examples: the likeliest choice.

    The published files do not say which choice is right. Without `labels` the task compares with the full cache instead
    (kind "fidelity"): the first choice is fed, and the predictions are compared with the full cache's.
    """
    at_least("h2o_choice", 2, choices=choices)
    kind: Kind = "choice" if labels else "fidelity"

    def read() -> list[Group]:
        rows = read_rows(path)
        if len(rows) % choices:
            raise DataError(f"{path} has {len(rows)} rows, which are no whole groups of {choices}; set choices")
        groups = [tuple(rows[i : i + choices]) for i in range(0, len(rows), choices)]
        if not labels:
            return [(group, None) for group in groups]
        return list(zip(groups, read_labels(labels, len(groups), choices), strict=True))

    def make(group: Group, room: TokenBudget) -> Sample:
        rows, right = group
        prompts = [row.words("prompt") for row in rows]
        shots, stem, ends = _divided(rows[0], prompts)
        question = Question(stem, references=ends[:1], choices=ends, right=right or 0)
        return Sample(rows[0].name, shots, (question,))

    return FileTask("h2o_choice", read, make, kind=kind)


@task("h2o_summary", paper="arXiv:2306.14048")
def h2o_summary(path: Annotated[str, "a file with article (the whole prompt) and summary_gt"] = "") -> Task:
    """XSum and CNN/DailyMail without examples: ROUGE-L of the summary."""

    def make(row: DataRow, room: TokenBudget) -> Sample:
        context, text = _request(row.words("article"))
        stop = row.texts("stop") if row.fields.get("stop") else ("###",)
        most = row.whole("max_tokens") if "max_tokens" in row.fields else 64
        return Sample(row.name, context, (Question(text, (row.words("summary_gt"),), most, stop),))

    return FileTask(
        "h2o_summary", lambda: read_rows(path), make, lambda asked, answer: rouge(asked.references, answer).long
    )


def _request(prompt: str) -> tuple[str, str]:
    """The article, and the request that stands after it; if there is none, one of our own."""
    context, blank, request = prompt.rpartition("\n\nSummarize the above article")
    if blank:
        return context, blank + request
    return prompt.rstrip(), "\n\nSummarize the article above in 3 sentences.\n"


def _divided(row: DataRow, prompts: Sequence[str]) -> tuple[str, str, tuple[str, ...]]:
    """What all prompts of a question share before the last blank line, and after it; then what differs, by words."""
    same = _shared(min(prompts), max(prompts))
    blank = same.rfind("\n\n")
    if blank < 1:
        raise row.error("prompt", f"shares no examples with the next rows; is it {len(prompts)} rows to a question?")
    cut = len(same)
    while cut > blank and not all(prompt[cut : cut + 1].isspace() and prompt[cut:].strip() for prompt in prompts):
        cut -= 1
    if cut <= blank + 2:
        raise row.error("prompt", f"shares no question with the next rows; is it {len(prompts)} rows to a question?")
    return same[:blank], same[blank:cut], tuple(prompt[cut:] for prompt in prompts)


def _shared(left: str, right: str) -> str:
    """What both texts begin with; for the first and the last of a sorted list, what all of it begins with."""
    same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False)))
    return left[:same]
