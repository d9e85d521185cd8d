"""Questions with the documents that answer them, from the published formats of SQuAD and HotpotQA or plain rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from millpond.errors import DataError
from millpond_lab.evals.data.data_files import DataRow, read_rows


@dataclass(frozen=True)
class DocumentQuestion:
    """A question, its accepted answers, the documents that hold them, and the place in its file."""

    name: str
    question: str
    answers: tuple[str, ...]
    documents: tuple[str, ...]


def read_asked(path: str) -> list[DocumentQuestion]:
    """All questions of a file that have an answer.

    Raises:
        DataError: a file or field that cannot be read, or no question with an answer.
    """
    asked = [each for row in read_rows(path) for each in (_squad(row) if "data" in row.fields else _plain(row))]
    if not asked:
        raise DataError(f"{path} holds no question that can be answered; name a file with at least two")
    return asked


def _plain(row: DataRow) -> Iterator[DocumentQuestion]:
    answers = row.texts("answers") if "answers" in row.fields else (row.words("answer"),)
    yield DocumentQuestion(row.name, row.words("question"), answers, _documents(row))


def _documents(row: DataRow) -> tuple[str, ...]:
    context = row.fields.get("context")
    if isinstance(context, list) and context and all(_is_titled(each) for each in context):
        return tuple(f"{title}. {' '.join(sentences)}" for title, sentences in context)
    return row.texts("context") if isinstance(context, list) else (row.words("context"),)


def _is_titled(each: object) -> bool:
    return isinstance(each, list) and len(each) == 2 and isinstance(each[0], str) and isinstance(each[1], list)


def _squad(row: DataRow) -> Iterator[DocumentQuestion]:
    for article in _rows(row, "data"):
        for paragraph in _rows(article, "paragraphs"):
            for asked in _rows(paragraph, "qas"):
                if asked.fields.get("is_impossible") or not asked.fields.get("answers", True):
                    continue
                answers = tuple(answer.words("text") for answer in _rows(asked, "answers"))
                yield DocumentQuestion(
                    f"{row.name}:{asked.fields.get('id', asked.number)}",
                    asked.words("question"),
                    answers,
                    (paragraph.words("context"),),
                )


def _rows(row: DataRow, field: str) -> list[DataRow]:
    value = row.fields.get(field)
    if not isinstance(value, list) or not value or not all(isinstance(each, dict) for each in value):
        raise row.error(field, "must be a list of at least one object")
    return [DataRow(each, f"{row.path}, {field}", number) for number, each in enumerate(value, start=1)]
