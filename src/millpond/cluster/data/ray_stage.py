"""generate_dataset: a stage of Ray Data that answers the rows of a dataset."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from millpond.cluster.data.answer_files import AnswerFiles
from millpond.cluster.data.row_engine import Row, RowColumns, RowEngine, in_order, key_of
from millpond.engine.config import EngineConfig, EngineOptions
from millpond.engine.llm import LLM
from millpond.engine.sampling.params import SamplingParams
from millpond.errors import OptionError
from millpond.optional import require

#: Times that rows are done again whose process ended.
RESTARTS = 3


class AnswerRows:
    """What runs in each process of Ray Data: an engine, and rows that come and go.

    Args:
        model, config, dtype, threads: as of `LLM`. out: folder of answers that are kept; None: none are.
        done: keys of rows that are left out.
        params, columns, in_flight: see `RowEngine`.
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
        """The rows of a block with their answers, column by column.

        They come in their order, since Ray does a block again from its beginning and goes on where it was.
        """
        rows = list(rows_of(block))
        kept: dict[int, Row] = {}
        if self._files is not None:
            rows = [row for row in rows if key_of(row, self._key) not in self._done]
            found = ((place, self._kept.get(key_of(row, self._key))) for place, row in enumerate(rows))
            kept = {place: row for place, row in found if row is not None}
        for row in in_order(self._answers(rows, [place for place in range(len(rows)) if place not in kept]), kept):
            yield {name: np.array([value], dtype=_dtype(value)) for name, value in row.items()}

    def _answers(self, rows: Sequence[Row], places: Sequence[int]) -> Iterator[tuple[int, Row]]:
        """The rows at these places, each when it is finished, and in a file if there are files."""
        answered: Iterator[tuple[int, Row]] = self._engine.run(rows[place] for place in places)
        if self._files is not None:
            answered = self._files.keep(answered)
        for number, row in answered:
            yield places[number], row


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
        dataset: a `ray.data.Dataset`; its blocks are what processes share (`repartition`).
        model: a name or folder that every process can open.
        config: of each engine; None for the defaults.
        prompt: column of the prompts, texts or token ids.
        key: column that names a row; needed for `out`.
        params: of every answer; one answer for each row.
        replicas: processes, each with one engine.
        in_flight: rows that an engine has at a time.
        out: folder for files of answered rows (JSON lines); rows whose key has an answer there now are left out, and a
            second run does what is missing. None: nothing is kept.
        dtype: as of `LLM`.
        threads: of each process, as of `LLM`.
        **options: fields of `EngineConfig`, in place of those of `config`.

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
    """The rows of columns."""
    names = list(block)
    for values in zip(*block.values(), strict=True):
        yield dict(zip(names, values, strict=True))


def _dtype(value: Any) -> Any:
    """Texts and what may be missing are objects; numbers stay as they are."""
    return object if value is None or isinstance(value, str) else None
