"""RowEngine: answers rows as they come, with an engine that is never left half empty while rows are there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from millpond.engine.engine import Engine
from millpond.engine.outputs import RequestOutput
from millpond.engine.request import Request
from millpond.engine.sampling.params import SamplingParams
from millpond.errors import DataError, MillpondError

#: A row: its values by column.
Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RowColumns:
    """Columns that are read and written.

    Attributes:
        prompt: a text, or token ids. key: what tells rows apart. answer: the text of the answer; error: why there is
            none, as "class: message"; None where there is one.
    """

    prompt: str
    key: str
    answer: str = "answer"
    error: str = "error"


class RowEngine:
    """Answers rows with one engine.

    Args:
        engine: with nothing in it. params: of every answer. columns: see `RowColumns`.
        in_flight: rows that the engine has at a time, those that wait included.
    """

    def __init__(self, engine: Engine, params: SamplingParams, columns: RowColumns, in_flight: int) -> None:
        self._engine, self._params, self._columns, self._in_flight = engine, params, columns, in_flight
        self._rows: dict[str, tuple[int, Row]] = {}
        self._number = 0

    def run(self, rows: Iterable[Row]) -> Iterator[tuple[int, dict[str, Any]]]:
        """The places of the rows and the rows with their answers, each as soon as it is finished: not in their order.

        A row that is refused, or fails, comes with an error and no answer. The next row is read when one is finished,
        so that no row waits for the rest of a batch. Leaving the iterator cancels what is in flight.
        """
        coming, more = enumerate(rows), True
        try:
            while more or self._rows:
                while more and len(self._rows) < self._in_flight:
                    found = next(coming, None)
                    more = found is not None
                    if found is not None and (refused := self._add(*found)) is not None:
                        yield found[0], refused
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
            outputs = self._engine.end_all(error)
        for output in outputs:
            if output.finished and (found := self._rows.pop(output.request_id, None)) is not None:
                yield found[0], self._answered(found[1], output, output.error)

    def _answered(self, row: Row, output: RequestOutput | None, error: Exception | None) -> dict[str, Any]:
        text = None if output is None or error is not None else output.completions[0].text
        why = None if error is None else f"{type(error).__name__}: {error}"
        return {**row, self._columns.answer: text, self._columns.error: why}


def prompt_of(row: Row, column: str) -> str | tuple[int, ...]:
    """The prompt of a row.

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


def in_order(found: Iterable[tuple[int, Row]], before: Mapping[int, Row]) -> Iterator[Row]:
    """Rows in the order of their places, which are all from 0 on. before: those that are there already."""
    there, at = dict(before), 0
    for place, row in found:
        there[place] = row
        while at in there:
            yield there.pop(at)
            at += 1
    while at in there:
        yield there.pop(at)
        at += 1


def key_of(row: Row, column: str) -> str:
    """The key of a row, as files of answers are compared by it.

    Raises:
        DataError: there is none.
    """
    value = row.get(column)
    if value is None:
        raise DataError(f"a row has no key in column {column!r}: each needs one by which its answer is found")
    return str(value.item() if isinstance(value, np.generic) else value)
