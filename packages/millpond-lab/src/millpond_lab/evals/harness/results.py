"""Reading of the rows and records that runs wrote, for pictures and tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from millpond.errors import DataError
from millpond_lab.evals.decoding.record import Cell, Record, SummaryRow
from millpond_lab.evals.harness.store import RUN, SAMPLES, SUMMARY, parse_records, read_json

_ROW = {field.name for field in fields(SummaryRow)}
_CELL = [field.name for field in fields(Cell)]


def read_rows(path: Path) -> list[SummaryRow]:
    """The rows of a run's folder, or of a summary file.

    Raises:
        DataError: there is no summary, or it is not a list of rows.
    """
    file = path / SUMMARY if path.is_dir() else path
    if not file.exists():
        raise DataError(f"{path} holds no {SUMMARY}; millpond eval --out {path} writes one")
    data = read_json(file)
    if not isinstance(data, list):
        raise DataError(f"{file} is not a list of rows")
    return [_row(file, number, item) for number, item in enumerate(data, 1)]


def _row(file: Path, number: int, item: Any) -> SummaryRow:
    if not isinstance(item, dict) or not _ROW - {"masks_only", "extra", "scored_tokens"} <= item.keys() <= _ROW:
        got = sorted(item) if isinstance(item, dict) else type(item).__name__
        raise DataError(f"{file}, row {number} has the fields {got}, not those of a row: {sorted(_ROW)}")
    numbers = {name: math.nan for name in ("score", "low", "high") if item[name] is None}
    return SummaryRow(**{**item, **numbers})


def cell_of(row: SummaryRow) -> Cell:
    """The cell that a row sums up."""
    return Cell(**{name: getattr(row, name) for name in _CELL})


def read_samples(folder: Path) -> list[Record]:
    """The records of a run's folder; none where it holds no samples.

    Raises:
        DataError: a line is not a record.
    """
    file = folder / SAMPLES
    return parse_records(file, file.read_bytes()) if file.exists() else []


def read_notes(path: Path) -> list[dict[str, str]]:
    """How a run was made, once for each time that it was started; none where it was not recorded."""
    file = (path if path.is_dir() else path.parent) / RUN
    runs: Sequence[Any] = read_json(file).get("runs", []) if file.exists() else []
    return [{name: str(value) for name, value in note.items()} for note in runs if isinstance(note, dict)]


def unite(rows: Sequence[SummaryRow]) -> list[SummaryRow]:
    """Rows of several folders; where two speak of the same cell they must agree.

    Raises:
        DataError: two runs give one cell different scores.
    """
    found: dict[Cell, SummaryRow] = {}
    for row in rows:
        cell = cell_of(row)
        before = found.setdefault(cell, row)
        if (before.n, repr(before.score)) != (row.n, repr(row.score)):
            raise DataError(
                f"two results for {row.method} {row.budget} on {row.task} ({row.protocol}, seed {row.seed}): "
                f"{before.score:.4f} of {before.n} and {row.score:.4f} of {row.n}; name only one of the runs"
            )
    return list(found.values())
