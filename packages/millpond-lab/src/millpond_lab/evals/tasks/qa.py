"""RULER's two question answering families: documents with an answer among documents without (arXiv:2404.06654)."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import cache
from typing import Annotated

from millpond.errors import DataError
from millpond.option_ranges import SOME_POSITIONS
from millpond_lab.evals.data.documents import DocumentQuestion, read_asked
from millpond_lab.evals.data.generated_task import Draft, GeneratedTask
from millpond_lab.evals.data.haystack import Haystack, depths
from millpond_lab.evals.metrics import found_any
from millpond_lab.evals.sample import Question
from millpond_lab.evals.task import Task, task

_INTRO = "Answer the question at the end from the documents below, in as few words as you can.\n\n"


@task("qa", paper="arXiv:2404.06654")
def qa(
    path: Annotated[str, "SQuAD JSON, HotpotQA JSON, or rows with question, answers and context; may end in .gz"] = "",
    length: Annotated[int, "tokens of context, question and answer", SOME_POSITIONS] = 4096,
) -> Task:
    """Answer a question from its documents, hidden among the documents of other questions.

    The file is one of: SQuAD (`data[].paragraphs[]` with `context` and `qas[]` of `question`, `answers[].text`; those
    that cannot be answered are left out); HotpotQA (a list of `question`, `answer`, `context` as [title, sentences]
    pairs); rows with `question`, `answers` (or `answer`) and `context`, a text or a list of texts. Other questions'
    documents fill the text, over again where they are few. An answer counts if it holds a reference.
    """
    read: Callable[[], list[DocumentQuestion]] = cache(lambda: _readable(path))

    def write(rng: random.Random, index: int) -> Draft:
        asked = read()
        own = asked[rng.randrange(len(asked))]
        where = depths(rng, len(own.documents))
        needles = [(depth, _shown(text)) for depth, text in zip(where, own.documents, strict=True)]
        hay = Haystack(_others(asked, own, rng), join="\n\n")
        text = f"\n\nQuestion: {own.question}\nAnswer:"
        question = Question(text, own.answers, stop=("\n",))
        return Draft(lambda n: _INTRO + hay.text(n, needles), (question,), {"row": own.name})

    return GeneratedTask("qa", length, write, grade=found_any)


def _readable(path: str) -> list[DocumentQuestion]:
    asked = read_asked(path)
    if len({text for each in asked for text in each.documents}) <= max(len({*each.documents}) for each in asked):
        raise DataError(f"{path} holds the documents of one question only, and others must fill the text; add rows")
    return asked


def _others(asked: list[DocumentQuestion], own: DocumentQuestion, rng: random.Random) -> Iterator[str]:
    texts = list(dict.fromkeys(text for each in asked for text in each.documents if text not in own.documents))
    rng.shuffle(texts)
    while True:
        yield from map(_shown, texts)


def _shown(text: str) -> str:
    return "Document: " + " ".join(text.split())
