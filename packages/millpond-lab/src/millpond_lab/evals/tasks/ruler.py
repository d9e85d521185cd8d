"""RULER's own files: the JSON Lines that its scripts write, scored as it scores (Hsieh et al., arXiv:2404.06654)."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Literal

from millpond.errors import DataError, OptionError
from millpond.option_ranges import POSITIONS, SOME_POSITIONS
from millpond_lab.evals.data.data_files import DataRow, DocumentQuestion, FileTask, read_asked, read_rows
from millpond_lab.evals.data.generated_task import Draft, GeneratedTask, TokenBudget, at_least
from millpond_lab.evals.data.haystack import Haystack, depths
from millpond_lab.evals.metrics import found_any, string_match_all, string_match_part
from millpond_lab.evals.sample import Question, Sample
from millpond_lab.evals.task import Task, task

Match = Literal["all", "part"]
#: What a row may hold at most: answers, and characters of one.
MOST_OUTPUTS, MOST_CHARACTERS = 1_000, 10_000


@dataclass(frozen=True, slots=True)
class Family:
    """How one of RULER's kinds of tasks is asked and scored, as in its `synthetic/constants.py`.

    Attributes:
        new_tokens: decoded for an answer. question: begins where this text occurs for the last time.
        match: whether all outputs are wanted, each worth its share, or any.
    """

    new_tokens: int
    question: str = "\nQuestion:"
    match: Match = "all"


FAMILIES = {
    "niah": Family(128, "\nWhat "),
    "vt": Family(30),
    "cwe": Family(120),
    "fwe": Family(50),
    "qa": Family(32, match="part"),
}
_LONG_NAMES = {"variable_tracking": "vt", "common_words_extraction": "cwe", "freq_words_extraction": "fwe"}
_MATCHES: dict[Match, Callable[[Sequence[str], str], float]] = {"all": string_match_all, "part": string_match_part}


@task("ruler", paper="arXiv:2404.06654")
def ruler(
    path: Annotated[str, "JSON Lines with index, input, outputs and length; may end in .gz"] = "",
    task: Annotated[str, "RULER's task, as niah_single_1 or qa_2; else the file's or its folder's name"] = "",
    match: Annotated[Literal["task", "all", "part"], "outputs wanted: all, each its share, or any"] = "task",
    question: Annotated[str, "text with which the question begins, where it occurs last; else the task's"] = "",
    max_new_tokens: Annotated[int, "most tokens of an answer; 0: the task's", POSITIONS] = 0,
) -> Task:
    """Files that RULER's scripts made, with its counts of tokens and its scores.

    Fields: `input` (the whole prompt), `outputs` (a list), `index`, `length`, and if there is one `answer_prefix`,
    which ends the prompt. `niah_*`, `vt`, `cwe` and `fwe` score the share of the outputs that occur in the answer
    (`string_match_all`), `qa_*` whether any does (`string_match_part`); in words too, whatever the case. For
    `--protocol agnostic` and `turns` the prompt is cut before its question.
    """
    at_least("ruler", 0, max_new_tokens=max_new_tokens)
    name = task or _name_of(path)
    family = _family(name, path) if name or path else FAMILIES["qa"]  # without a file, reading says what is missing
    begins = question or family.question
    grade = _MATCHES[family.match if match == "task" else match]

    def make(row: DataRow, room: TokenBudget) -> Sample:
        context, asked = _cut(row, begins)
        text = asked + (row.text("answer_prefix") if "answer_prefix" in row.fields else "")
        found = Question(text, row.texts("outputs"), max_new_tokens or family.new_tokens)
        return Sample(row.name, context, (found,), {"length": row.whole("length"), "task": name})

    return FileTask("ruler", partial(_read, path, begins), make, lambda asked, answer: grade(asked.references, answer))


def _name_of(path: str) -> str:
    """RULER writes NAME/validation.jsonl; others NAME.jsonl."""
    file = Path(path)
    names = (file.name.partition(".")[0], file.parent.name)
    return next((name for name in names if _key(name) in FAMILIES), "")


def _key(name: str) -> str:
    return _LONG_NAMES.get(name, name.partition("_")[0])


def _family(name: str, path: str) -> Family:
    if _key(name) not in FAMILIES:
        what = f"task={name!r} is none of RULER's" if name else f"neither {path} nor its folder is named for a task"
        raise OptionError(f"ruler: {what}; add task= with niah_..., vt, cwe, fwe or qa_... to the options")
    return FAMILIES[_key(name)]


def _read(path: str, begins: str) -> list[DataRow]:
    """All rows, each checked, whichever of them will be drawn."""
    rows = read_rows(path)
    for row in rows:
        for field, least in (("index", 0), ("length", 1)):
            if row.whole(field) < least:
                raise row.error(field, f"is {row.whole(field)}, and must be at least {least}")
        outputs = row.texts("outputs")
        if len(outputs) > MOST_OUTPUTS or any(not 0 < len(each.strip()) <= MOST_CHARACTERS for each in outputs):
            raise row.error("outputs", f"must be 1 to {MOST_OUTPUTS:,} texts of 1 to {MOST_CHARACTERS:,} characters")
        _cut(row, begins)
    return rows


def _cut(row: DataRow, begins: str) -> tuple[str, str]:
    """The prompt before its question, and from it on."""
    whole = row.words("input")
    place = whole.rfind(begins)
    if not whole[: max(place, 0)].strip():
        raise row.error("input", f"has no question that begins with {begins!r} behind a text; add question=TEXT")
    return whole[:place], whole[place:]


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
