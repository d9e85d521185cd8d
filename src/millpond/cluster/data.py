"""Answers for the rows of a dataset: an engine that is kept full, its files, and the stage of Ray Data around it."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from millpond.engine.config import EngineConfig
from millpond.engine.engine import Engine
from millpond.engine.llm import LLM
from millpond.engine.options import EngineOptions
from millpond.engine.outputs import RequestOutput
from millpond.engine.request import Request
from millpond.engine.sampling.params import SamplingParams
from millpond.errors import DataError, MillpondError, OptionError
from millpond.optional import require
from millpond.setting import shows_options

#: A row: its values by column.
Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RowColumns:
    """Columns that are read and written.

    Attributes:
        prompt: Column of the prompts: a text, or token ids.
        key: Column that tells rows apart.
        answer: Column of the text of the answer; None if there is none.
        error: Column of why there is none, as "class: message"; None if there is one.
    """

    prompt: str
    key: str
    answer: str = "answer"
    error: str = "error"


class RowEngine:
    """Answers rows with one engine.

    Args:
        engine: Engine with nothing in it.
        params: Sampling parameters of every answer.
        columns: See `RowColumns`.
        in_flight: Rows that the engine has at a time, those that wait included.
    """

    def __init__(self, engine: Engine, params: SamplingParams, columns: RowColumns, in_flight: int) -> None:
        self._engine, self._params, self._columns, self._in_flight = engine, params, columns, in_flight
        self._rows: dict[str, tuple[int, Row]] = {}
        self._number = 0

    def run(self, rows: Iterable[Row]) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield rows with their indices and answers, each as soon as it is finished: not in order.

        A row that is refused, or fails, comes with an error and no answer. The next row is read when one is finished,
        so that no row waits for the rest of a batch. Leaving the iterator cancels what is in flight.
        """
        coming, more = enumerate(rows), True
        try:
            while more or self._rows:
                while more and len(self._rows) < self._in_flight:
                    numbered = next(coming, None)
                    more = numbered is not None
                    if numbered is not None and (refused := self._add(*numbered)) is not None:
                        yield numbered[0], refused
                if self._rows:
                    yield from self._step()
        finally:
            for name in self._rows:
                self._engine.cancel(name)
            self._rows.clear()
            self._engine.drain()

    def _add(self, place: int, row: Row) -> dict[str, Any] | None:
        """Take a row in; returns it with an error where it is refused."""
        name = str(self._number)
        self._number += 1
        try:
            prompt = prompt_of(row, self._columns.prompt)
            self._engine.add(Request(request_id=name, prompt=prompt, params=self._params))
        except MillpondError as error:
            return self._answered(row, None, error)
        self._rows[name] = place, row
        return None

    def _step(self) -> Iterator[tuple[int, dict[str, Any]]]:
        try:
            outputs = self._engine.step()
        except Exception as error:  # the rows in flight have it, and the next ones go on
            outputs = self._engine.abort_all(error)
        for output in outputs:
            if output.finished and (numbered := self._rows.pop(output.request_id, None)) is not None:
                yield numbered[0], self._answered(numbered[1], output, output.error)

    def _answered(self, row: Row, output: RequestOutput | None, error: Exception | None) -> dict[str, Any]:
        text = None if output is None or error is not None else output.completions[0].text
        why = None if error is None else f"{type(error).__name__}: {error}"
        return {**row, self._columns.answer: text, self._columns.error: why}


def prompt_of(row: Row, column: str) -> str | tuple[int, ...]:
    """Return the prompt of a row.

    Raises:
        DataError: there is none, or it is neither a text nor token ids.
    """
    value = row.get(column)
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, str):
        return value
    if isinstance(value, list | tuple) and all(type(one) is int for one in value):
        return tuple(value)
    kind = "missing" if value is None else f"a {type(value).__name__}"
    raise DataError(f"the prompt in column {column!r} is {kind}: it must be a text or a list of token ids")


def in_order(rows: Iterable[tuple[int, Row]], previous: Mapping[int, Row]) -> Iterator[Row]:
    """Yield rows in the order of their indices, which are all from 0 on.

    Args:
        rows: Rows with their indices, in any order.
        previous: Rows that are complete already, by index.
    """
    ready, at = dict(previous), 0
    for place, row in rows:
        ready[place] = row
        while at in ready:
            yield ready.pop(at)
            at += 1
    while at in ready:
        yield ready.pop(at)
        at += 1


def key_of(row: Row, column: str) -> str:
    """Return the key of a row, as files of answers are compared by it.

    Raises:
        DataError: there is none.
    """
    value = row.get(column)
    if value is None:
        raise DataError(f"a row has no key in column {column!r}: each needs one by which its answer is found")
    return str(value.item() if isinstance(value, np.generic) else value)


#: Rows of one file: what a process that is killed has to do again, at most.
ROWS = 64
_SUFFIX = ".jsonl"


class AnswerFiles:
    """Rows with their answers in files of a folder.

    Args:
        folder: Made if it is missing.
        columns: See `RowColumns`.

    Raises:
        DataError: the folder cannot be made.
    """

    def __init__(self, folder: Path, columns: RowColumns) -> None:
        self._folder, self._columns = folder, columns
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DataError(f"answers cannot be kept in {folder}: {error.strerror}") from None

    def keys(self) -> frozenset[str]:
        """Return the keys of the rows that have an answer.

        A row that failed is not among them, and is tried again.

        Raises:
            DataError: a file that is no file of answers.
        """
        return frozenset(self.newer(frozenset()))

    def newer(self, than: frozenset[str]) -> dict[str, Row]:
        """Return rows with an answer by their keys, without those of `than`.

        Raises:
            DataError: a file that is no file of answers.
        """
        answered = (row for row in self.rows() if row.get(self._columns.error) is None)
        return {key: row for row in answered if (key := key_of(row, self._columns.key)) not in than}

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield all rows of all files; where a key was answered more than once, each time.

        Raises:
            DataError: a line that is no row.
        """
        for file in sorted(self._folder.glob(f"*{_SUFFIX}")):
            try:
                lines = file.read_text(encoding="utf-8").splitlines()
            except (OSError, UnicodeDecodeError):
                raise DataError(f"{file} cannot be read as text: move it away, and run again") from None
            for number, line in enumerate(lines, 1):
                try:
                    row = json.loads(line)
                except ValueError:
                    row = None
                if not isinstance(row, dict):
                    raise DataError(f"{file}, line {number}, is no row of answers: move the file away, and run again")
                yield row

    def keep(self, rows: Iterable[tuple[int, Row]]) -> Iterator[tuple[int, Row]]:
        """Yield the same rows, each file of them written before its first one is passed on.

        Raises:
            DataError: a file cannot be written, or a row has no key.
        """
        coming = iter(rows)
        while numbered := list(islice(coming, ROWS)):
            self._write([row for _, row in numbered])
            yield from numbered

    def _write(self, rows: list[Row]) -> None:
        text = "".join(json.dumps(row, default=_plain) + "\n" for row in rows)
        name = f"{os.getpid()}-{secrets.token_hex(8)}"
        part = self._folder / f"{name}.part"
        try:
            part.write_text(text, encoding="utf-8")
            part.replace(self._folder / f"{name}{_SUFFIX}")
        except OSError as error:
            part.unlink(missing_ok=True)
            raise DataError(f"answers cannot be kept in {self._folder}: {error.strerror}") from None


def _plain(value: Any) -> Any:
    """Return a value of numpy as JSON has it.

    Raises:
        DataError: a value of another kind.
    """
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise DataError(f"a column has a {type(value).__name__}, which JSON does not: drop it, or give no out= folder")


#: Times that rows are done again whose process ended.
RESTARTS = 3


class AnswerRows:
    """Stage in each process of Ray Data: an engine, and the rows that it answers.

    Args:
        model: As of `LLM`.
        config: As of `LLM`.
        dtype: As of `LLM`.
        threads: As of `LLM`.
        params: See `RowEngine`.
        columns: See `RowEngine`.
        in_flight: See `RowEngine`.
        out: Folder of answers that are kept; None: none are.
        done: Keys of rows that are left out.
    """

    def __init__(
        self,
        model: str,
        config: EngineConfig,
        dtype: str | None,
        threads: int | None,
        params: SamplingParams,
        columns: RowColumns,
        in_flight: int,
        out: str | None,
        done: frozenset[str],
    ) -> None:
        self._llm = LLM(model, config, dtype=dtype, threads=threads)
        self._engine = RowEngine(self._llm.engine, params, columns, in_flight)
        self._files = None if out is None else AnswerFiles(Path(out), columns)
        self._key, self._done = columns.key, done
        # of a process that was killed in the same run: it had written them, and no one may have read them
        self._kept = {} if self._files is None else self._files.newer(done)

    def __call__(self, block: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the rows of a block with their answers, column by column.

        They come in their order, since Ray does a block again from its beginning and continues where it was.
        """
        rows = list(rows_of(block))
        answered: dict[int, Row] = {}
        if self._files is not None:
            rows = [row for row in rows if key_of(row, self._key) not in self._done]
            stored = ((place, self._kept.get(key_of(row, self._key))) for place, row in enumerate(rows))
            answered = {place: row for place, row in stored if row is not None}
        for row in in_order(
            self._answers(rows, [place for place in range(len(rows)) if place not in answered]), answered
        ):
            yield {name: np.array([value], dtype=_dtype(value)) for name, value in row.items()}

    def _answers(self, rows: Sequence[Row], places: Sequence[int]) -> Iterator[tuple[int, Row]]:
        """Yield the rows at these indices, each when finished, through a file if there is one."""
        answered: Iterator[tuple[int, Row]] = self._engine.run(rows[place] for place in places)
        if self._files is not None:
            answered = self._files.keep(answered)
        for number, row in answered:
            yield places[number], row


@shows_options(EngineConfig)
def generate_dataset(
    dataset: Any,
    model: str | PathLike[str],
    config: EngineConfig | None = None,
    *,
    prompt: str = "text",
    key: str = "id",
    params: SamplingParams | None = None,
    replicas: int = 1,
    in_flight: int = 64,
    out: str | PathLike[str] | None = None,
    dtype: str | None = None,
    threads: int | None = None,
    **options: Unpack[EngineOptions],
) -> Any:
    """Answer the rows of a dataset with several engines, in processes that Ray Data starts.

    Each block of the dataset is answered by one engine, which is kept full from its rows. A row that is refused or
    fails comes with an error and no answer. Where a process is killed, its block is answered once more.

    Args:
        dataset: A `ray.data.Dataset`; its blocks are what processes share (`repartition`).
        model: A name or folder that every process can open.
        config: Configuration of each engine; None for the defaults.
        prompt: Column of the prompts, texts or token ids.
        key: Column that names a row; needed for `out`.
        params: Sampling parameters of every answer; one answer for each row.
        replicas: Processes, each with one engine.
        in_flight: Rows that an engine has at a time.
        out: Folder for files of answered rows (JSON lines); rows whose key has an answer there now are left out, and a
            second run does what is missing. None: nothing is kept.
        dtype: As of `LLM`.
        threads: Threads of each process, as of `LLM`.
        **options: Fields of `EngineConfig`, in place of those of `config`.

    Returns:
        A `ray.data.Dataset`, computed when it is read: the rows with the columns "answer" and "error". With `out`,
        those that were missing there; the files have all of them.

    Raises:
        OptionError: Ray Data is not installed, or a number is out of range. DataError: a file in `out` that holds no
            answers.
    """
    data = require("ray.data", "cluster", "generate_dataset")
    params = params or SamplingParams()
    for name, number in (("replicas", replicas), ("in_flight", in_flight)):
        if type(number) is not int or number < 1:
            raise OptionError(f"{name}={number!r}: must be a whole number, at least 1")
    if params.n != 1:
        raise OptionError(f"n={params.n}: a row has one answer; repeat rows for several")
    if not isinstance(model, str | PathLike):
        raise OptionError("the processes load the model themselves: give its name or folder")
    folder = None if out is None else str(Path(out).resolve())
    arguments = (
        fspath(model),
        EngineConfig.of(config, options),
        dtype,
        threads,
        params,
        RowColumns(prompt, key),
        in_flight,
        folder,
        frozenset() if folder is None else AnswerFiles(Path(folder), RowColumns(prompt, key)).keys(),
    )
    return dataset.map_batches(
        AnswerRows,
        fn_constructor_args=arguments,
        batch_size=None,
        batch_format="numpy",
        compute=data.ActorPoolStrategy(size=replicas),
        max_restarts=RESTARTS,
        max_task_retries=RESTARTS,
    )


def rows_of(block: Mapping[str, Any]) -> Iterator[Row]:
    """Yield the rows of columns."""
    names = list(block)
    for values in zip(*block.values(), strict=True):
        yield dict(zip(names, values, strict=True))


def _dtype(value: Any) -> Any:
    """Return the dtype of a column: object for texts and missing values, else as it is."""
    return object if value is None or isinstance(value, str) else None
