"""AnswerFiles: a folder of JSON lines with the rows that are answered, which a second run leaves out.

A file is written under another name and renamed when it is whole, so that a killed process leaves no half of one.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from millpond.cluster.data.row_engine import Row, RowColumns, key_of
from millpond.errors import DataError

#: Rows of one file: what a process that is killed has to do again, at most.
ROWS = 64
_SUFFIX = ".jsonl"


class AnswerFiles:
    """Rows with their answers in files of a folder.

    Args:
        folder: made where it is missing. columns: see `RowColumns`.

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
        """Keys of the rows that have an answer; one that failed is not among them, and is tried again.

        Raises:
            DataError: a file that is no file of answers.
        """
        return frozenset(self.newer(frozenset()))

    def newer(self, than: frozenset[str]) -> dict[str, Row]:
        """Rows with an answer by their keys, without those of `than`.

        Raises:
            DataError: a file that is no file of answers.
        """
        answered = (row for row in self.rows() if row.get(self._columns.error) is None)
        return {key: row for row in answered if (key := key_of(row, self._columns.key)) not in than}

    def rows(self) -> Iterator[dict[str, Any]]:
        """All rows of all files; where a key was answered more than once, each time.

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
        """The same rows with their places, each file of them written before its first one is passed on.

        Raises:
            DataError: a file cannot be written, or a row has no key.
        """
        coming = iter(rows)
        while found := list(islice(coming, ROWS)):
            self._write([row for _, row in found])
            yield from found

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
    """A value of numpy as JSON has it.

    Raises:
        DataError: a value of another kind.
    """
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise DataError(f"a column has a {type(value).__name__}, which JSON does not: drop it, or give no out= folder")
