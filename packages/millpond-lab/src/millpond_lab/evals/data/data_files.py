"""Data files that a user names: JSON Lines, JSON, either with .gz, and Parquet. Rows that know where they stand."""

from __future__ import annotations

import gzip
import importlib
import json
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from transformers import PreTrainedTokenizerBase

from millpond.errors import DataError, OptionError
from millpond.install_command import install_command
from millpond_lab.evals.data import pond_tasks
from millpond_lab.evals.data.generated_task import TokenBudget, stream
from millpond_lab.evals.metrics import exact
from millpond_lab.evals.sample import Question, Sample
from millpond_lab.evals.task import Kind

#: Bytes of a file that are read at most, decompressed.
MOST_BYTES = 1 << 30


@dataclass(frozen=True)
class DataRow:
    """One row: its fields, its file and its number (a line of JSON Lines, else the place in the list), from 1."""

    fields: Mapping[str, Any]
    path: str
    number: int

    @property
    def name(self) -> str:
        """Names the row for ever: the file's own name and the number."""
        return f"{Path(self.path).name}:{self.number}"

    def text(self, field: str) -> str:
        """A field that must be text."""
        return str(self._typed(field, str, "text"))

    def words(self, field: str) -> str:
        """A field that must be text with something in it."""
        value = self.text(field)
        if not value.strip():
            raise self.error(field, "is empty")
        return value

    def whole(self, field: str) -> int:
        """A field that must be a whole number, or the digits of one."""
        value = self._typed(field, (int, str), "a whole number")
        try:
            return int(value)
        except ValueError:
            raise self.error(field, f"is {value!r}, not a whole number") from None

    def texts(self, field: str) -> tuple[str, ...]:
        """A field that must be a list of at least one text."""
        value = self._typed(field, list, "a list of texts")
        if not value or not all(isinstance(each, str) for each in value):
            raise self.error(field, "must be a list of at least one text")
        return tuple(value)

    def error(self, field: str, what: str) -> DataError:
        """An error about one field of this row."""
        return DataError(
            f"{self.path}, row {self.number}: field {field!r} {what}; mend it, or name a file of this task's format"
        )

    def _typed(self, field: str, kind: type | tuple[type, ...], name: str) -> Any:
        if field not in self.fields:
            has = ", ".join(map(str, self.fields)) or "no fields"
            raise self.error(field, f"is missing (it has {has})")
        if not isinstance(self.fields[field], kind) or isinstance(self.fields[field], bool):
            raise self.error(field, f"is of type {type(self.fields[field]).__name__}, and must be {name}")
        return self.fields[field]


def read_rows(path: str) -> list[DataRow]:
    """All rows of a file.

    Raises:
        DataError: the file is not there, is broken, holds no row, or needs a library that is not installed.
    """
    if not path:
        raise DataError("this task reads a file, and none was named; add path=FILE to its options")
    rows = list(_parquet(path) if path.endswith(".parquet") else _json(path))
    if not rows:
        raise DataError(f"{path} holds no rows; name a file with at least one")
    return rows


def read_text(path: str) -> str:
    """The text of a file, decompressed where its name ends in .gz; every line ends with a single line feed.

    Raises:
        DataError: it is not there, no regular file, longer than `MOST_BYTES`, or not UTF-8 text.
    """
    file = Path(path).expanduser()
    if file.exists() and not file.is_file():
        raise DataError(f"{path} is no regular file; name a file of UTF-8 text, plain or .gz")
    try:
        with gzip.open(file) if path.endswith(".gz") else file.open("rb") as stream:
            data = stream.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise DataError(f"{path} has more than {MOST_BYTES:,} bytes of text; cut it into several files")
        text = data.decode("utf-8")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read ({error}); name a file of UTF-8 text, plain or .gz") from error
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _json(path: str) -> Iterator[DataRow]:
    text = read_text(path)
    if path.removesuffix(".gz").endswith(".json"):
        whole = _parsed(text, path, 1)
        values = list(enumerate(whole if isinstance(whole, list) else [whole], start=1))
    else:
        lines = enumerate(text.split("\n"), start=1)
        values = [(number, _parsed(line, path, number)) for number, line in lines if line.strip()]
    for number, fields in values:
        if not isinstance(fields, dict):
            raise DataError(f"{path}, row {number}: {str(fields)[:40]!r} is not an object with fields; mend the row")
        yield DataRow(fields, path, number)


def _parsed(text: str, path: str, number: int) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{path}, row {number}: not JSON ({error.msg} at line {error.lineno}, column {error.colno}); mend the row, "
            f"or download the file again if it was cut off"
        ) from error
    except (RecursionError, ValueError) as error:  # nested too deep, or a number of thousands of digits
        raise DataError(f"{path}, row {number}: not a row of data ({error}); mend the row") from error


def _parquet(path: str) -> Iterator[DataRow]:
    try:
        datasets: Any = importlib.import_module("datasets")
    except ImportError:
        raise DataError(f"{path}: Parquet files need the library datasets: {install_command('eval')}") from None
    if not Path(path).expanduser().is_file():
        raise DataError(f"{path} cannot be read (no such file); name an existing one")
    try:
        with tempfile.TemporaryDirectory() as folder:  # where the library unpacks; nothing of it stays
            table = datasets.Dataset.from_parquet(str(Path(path).expanduser()), cache_dir=folder, keep_in_memory=True)
            rows = table.to_list()
    except Exception as error:  # whatever the library's readers raise: pyarrow has its own tree of errors
        raise DataError(f"{path} cannot be read as Parquet ({error}); download it again") from error
    for number, fields in enumerate(rows, start=1):
        yield DataRow(fields, path, number)


Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Graded(Question):
    """A question that says by itself how its answer is graded, for files that mix ways.

    Attributes:
        metric: a name that the task knows. classes: what the answer may be, where it names one of some classes.
    """

    metric: str = ""
    classes: tuple[str, ...] = ()


def best_exact(question: Question, answer: str) -> float:
    """Exact match with one of the references."""
    return exact(question.references, answer)


@dataclass(frozen=True)
class FileTask(Generic[Item]):
    """A task over a file.

    Attributes:
        name: of the task. read: all items of the file (rows, or groups of rows), or a `DataError`.
        make: the sample of one item. grade: what an answer is worth. kind: see `Task.kind`.
    """

    name: str
    read: Callable[[], Sequence[Item]]
    make: Callable[[Item, TokenBudget], Sample]
    grade: Callable[[Question, str], float] = best_exact
    kind: Kind = "generate"

    def samples(self, tokenizer: PreTrainedTokenizerBase, count: int, seed: int) -> Iterator[Sample]:
        """See `Task.samples`."""
        refuse_pond(self.name, tokenizer)
        items, room = self.read(), TokenBudget(tokenizer)
        order = list(range(len(items)))
        stream(self.name, seed).shuffle(order)
        for index in order[:count]:
            yield self.make(items[index], room)

    def score(self, question: Question, answer: str) -> float:
        """See `Task.score`."""
        return self.grade(question, answer)


def refuse_pond(name: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that a model can read a file's words at all.

    Raises:
        OptionError: it is `pond-recall`, to which nearly every word is unknown.
    """
    if pond_tasks.speaks_pond(tokenizer):
        raise OptionError(f"{name}: pond-recall knows none of the words of a file; name another model, or another task")


def shortened(room: TokenBudget, context: str, questions: Sequence[str], max_tokens: int) -> str:
    """`context` with its middle cut out where the prompt is longer than `max_tokens` (0: never)."""
    if not max_tokens or room.prompt(context, questions) <= max_tokens:
        return context
    return room.cut_middle(context, max_tokens - max(map(room.tokens, questions)))


def read_labels(path: str, count: int, choices: int) -> list[int]:
    """`count` indices below `choices`, one a line.

    Raises:
        DataError: a line that is no such index, or another number of lines.
    """
    lines = read_text(path).split()
    for number, line in enumerate(lines, start=1):
        if not line.isdecimal() or int(line) >= choices:
            raise DataError(f"{path}, line {number}: {line[:40]!r} must be a choice, 0 to {choices - 1}; mend the line")
    if len(lines) != count:
        raise DataError(f"{path} has {len(lines)} lines for {count} questions; name the labels that belong to the data")
    return [int(line) for line in lines]


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
