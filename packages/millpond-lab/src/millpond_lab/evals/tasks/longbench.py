"""LongBench: 21 datasets of long texts in one file format (Bai et al., arXiv:2308.14508)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated

from millpond.errors import unknown
from millpond.option_ranges import POSITIONS
from millpond_lab.evals.data.data_files import DataRow, FileTask, Graded, read_rows, shortened
from millpond_lab.evals.data.generated_task import TokenBudget, at_least
from millpond_lab.evals.data.longbench_datasets import WAYS
from millpond_lab.evals.metrics import class_named, code_similarity, f1, f1_zh, number_share, rouge, rouge_zh
from millpond_lab.evals.sample import Question, Sample
from millpond_lab.evals.task import Task, task

_METRICS: dict[str, Callable[[Sequence[str], str], float]] = {
    "f1": f1,
    "f1_zh": f1_zh,
    "rouge": lambda references, answer: rouge(references, answer).long,
    "rouge_zh": lambda references, answer: rouge_zh(references, answer).long,
    "number": number_share,
    "code": code_similarity,
}


@task("longbench", paper="arXiv:2308.14508")
def longbench(
    path: Annotated[str, "a file of LongBench rows; each row names its dataset"] = "",
    max_tokens: Annotated[int, "cut the middle out of longer prompts, as the benchmark does; 0: never", POSITIONS] = 0,
) -> Task:
    """Long texts in the format of LongBench, with the metric of the dataset that each row names.

    Fields: `context`, `input`, `answers` (a list), `dataset`, `all_classes` (for trec and lsht), `_id`.
    """
    at_least("longbench", 0, max_tokens=max_tokens)

    def make(row: DataRow, room: TokenBudget) -> Sample:
        name = row.text("dataset").removesuffix("_e")
        if name not in WAYS:
            raise row.error("dataset", f"names no dataset of LongBench: {unknown('dataset', name, WAYS)}")
        way = WAYS[name]
        text = way.after.replace("{input}", row.text("input"))
        classes = row.texts("all_classes") if way.metric == "class" else ()
        metric = f"{way.metric} first line" if way.first_line else way.metric
        question = Graded(text, row.texts("answers"), way.max_new_tokens, metric=metric, classes=classes)
        room_left = max_tokens and max(max_tokens - way.max_new_tokens, 1)
        context = shortened(room, way.before + row.words("context"), [text], room_left)
        return Sample(row.name, context, (question,), {"dataset": name})

    return FileTask("longbench", lambda: read_rows(path), make, _grade)


def _grade(question: Question, answer: str) -> float:
    assert isinstance(question, Graded)
    if question.metric.endswith(" first line"):
        answer = answer.lstrip("\n").split("\n")[0]
    metric = question.metric.removesuffix(" first line")
    if metric == "class":
        return class_named(question.references, answer, question.classes)
    return _METRICS[metric](question.references, answer)
