"""The folder of a run; records are appended as they come, so that an interrupted run can be resumed.

`run.json` says what was run, `samples.jsonl` holds one `Record` a line, `summary.json` a list of `SummaryRow`s.
"""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from millpond.errors import DataError, OptionError
from millpond_lab.evals.decoding.record import Cell, Record, SummaryRow
from millpond_lab.evals.harness.calibration_check import Said, settled
from millpond_lab.evals.task import Kind

RUN, SAMPLES, SUMMARY, TABLE = "run.json", "samples.jsonl", "summary.json", "summary.md"


class ResumeWarning(UserWarning):
    """An earlier run left something behind that cannot be used."""


@dataclass(frozen=True, slots=True)
class TaskFacts:
    """What must be equal when a run continues: a task's samples by their digest, and how many questions they hold."""

    kind: Kind
    samples: int
    questions: int
    digest: str


@dataclass
class RunStore:
    """The folder of a run.

    Attributes:
        setting: what all cells have in common; a run with another setting needs another folder.
        tasks: by their names with options. cells: all that were ever requested, in order.
        calibration: which one its codecs were opened with, see `calibrations.said_of`; None: none needs one.
        code: digests of the files of methods from outside the package, by their names.
        runs: one note for each time that the harness was started: command, machine, versions.
        records: by cell key, then by (sample, question).
    """

    folder: Path
    setting: dict[str, Any]
    tasks: dict[str, TaskFacts] = field(default_factory=dict)
    cells: list[Cell] = field(default_factory=list)
    runs: list[dict[str, Any]] = field(default_factory=list)
    calibration: Said | None = None
    code: dict[str, str] = field(default_factory=dict)
    records: dict[str, dict[tuple[str, int], Record]] = field(default_factory=dict)

    @classmethod
    def open(
        cls,
        folder: Path,
        setting: dict[str, Any],
        calibration: Said | None = None,
        code: Mapping[str, str] = MappingProxyType({}),
    ) -> RunStore:
        """The store in `folder`, new or as an earlier run left it.

        Raises:
            OptionError: the folder holds a run with another setting, another calibration, or a method's other code.
            DataError: the folder's files cannot be read.
        """
        store = cls(folder, setting, calibration=calibration, code=dict(code))
        if not (folder / RUN).exists():
            if (folder / SAMPLES).exists():
                raise DataError(f"{folder} holds {SAMPLES} without {RUN}; name another folder with --out")
            return store
        found = read_json(folder / RUN)
        try:
            _check_same(folder, found["setting"], setting)
            store.tasks = {name: TaskFacts(**facts) for name, facts in found["tasks"].items()}
            store.cells = [Cell(**cell) for cell in found["cells"]]
            store.runs = list(found["runs"])
            store.calibration = settled(folder, found.get("calibration"), store.cells, calibration)
            store.code = _settled_code(folder, found.get("code", {}), code)
        except (KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{folder / RUN} is not a run of this harness ({error})") from error
        for record in _read_records(folder / SAMPLES):
            store._remember(record)
        return store

    def begin(self, cells: Iterable[Cell], tasks: dict[str, TaskFacts], note: dict[str, Any]) -> None:
        """Add the cells, tasks and note of a run that begins, and write them down.

        Raises:
            OptionError: a task's samples are not those of the earlier run.
        """
        for name, facts in tasks.items():
            if self.tasks.get(name, facts) != facts:
                raise OptionError(
                    f"the samples of task {name!r} are not those that {self.folder} was begun with (its generator, "
                    "its data or the tokenizer changed); name another folder with --out"
                )
        self.tasks |= tasks
        self.cells = list(dict.fromkeys([*self.cells, *cells]))
        self.runs.append(note)
        self.folder.mkdir(parents=True, exist_ok=True)
        run = {
            "setting": self.setting,
            "calibration": self.calibration,
            "code": self.code,
            "tasks": {name: asdict(facts) for name, facts in self.tasks.items()},
            "cells": [asdict(cell) for cell in self.cells],
            "runs": self.runs,
        }
        replace_text(self.folder / RUN, json.dumps(run, indent=1))

    def has(self, cell: str, names: Sequence[tuple[str, int]]) -> bool:
        """Whether all these questions of a cell are answered."""
        return all(name in self.records.get(cell, {}) for name in names)

    def add(self, records: Iterable[Record]) -> None:
        """Append the records that are new."""
        fresh = [r for r in records if not self.has(r.cell, [(r.sample, r.question)])]
        lines = [json.dumps(asdict(record), ensure_ascii=False, allow_nan=False) + "\n" for record in fresh]
        with (self.folder / SAMPLES).open("a", encoding="utf-8") as file:
            file.write("".join(lines))
        for record in fresh:
            self._remember(record)

    def of(self, cell: Cell) -> list[Record]:
        """The records of a cell, in the order in which they were made."""
        return list(self.records.get(cell.key, {}).values())

    def finished(self) -> list[Cell]:
        """The cells whose every question is answered."""
        return [cell for cell in self.cells if len(self.of(cell)) == self.tasks[cell.task].questions]

    def write_summary(self, rows: Sequence[SummaryRow], table: str) -> None:
        """Replace the summary. A number that is not defined (all questions failed) is null."""
        data = [_without_nan(asdict(row)) for row in rows]
        replace_text(self.folder / SUMMARY, json.dumps(data, indent=1, allow_nan=False))
        replace_text(self.folder / TABLE, table)

    def _remember(self, record: Record) -> None:
        self.records.setdefault(record.cell, {})[record.sample, record.question] = record


def read_json(path: Path) -> Any:
    """What a JSON file holds.

    Raises:
        DataError: it cannot be read, or is not JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def _settled_code(folder: Path, before: Mapping[str, str], now: Mapping[str, str]) -> dict[str, str]:
    for name in now:
        if before.get(name, now[name]) != now[name]:
            raise OptionError(
                f"{folder} holds answers of method {name!r} from before its file was changed; give the method another "
                "name, or name another folder with --out"
            )
    return {**before, **now}


def _check_same(folder: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    for name in now:
        if before.get(name) != now[name]:
            raise OptionError(
                f"{folder} holds a run with {name}={before.get(name)!r}, this one has {name}={now[name]!r}; name "
                "another folder with --out (only methods, budgets, codecs, tasks and protocols can be added)"
            )


def _read_records(path: Path) -> list[Record]:
    """The records of a file; a half-written last line is cut off, with a warning."""
    if not path.exists():
        return []
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        warnings.warn(f"{path.name}: the last line was half written and is dropped", ResumeWarning, stacklevel=4)
        with path.open("r+b") as file:
            file.truncate(whole)
    return parse_records(path, data[:whole])


def parse_records(path: Path, data: bytes) -> list[Record]:
    """The records in the lines of `data`, which was read from `path`.

    Raises:
        DataError: a line is not a record.
    """
    records = []
    for number, line in enumerate(data.splitlines(), 1):
        try:
            records.append(Record(**json.loads(line)))
        except (ValueError, TypeError) as error:
            raise DataError(f"{path}, line {number} is not a record: {error}") from error
    return records


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nan(item) for name, item in value.items()}
    return None if isinstance(value, float) and math.isnan(value) else value


def replace_text(path: Path, text: str) -> None:
    """Write a file, ended by a line break, so that a reader finds the old one or the new one, whole."""
    draft = path.with_suffix(path.suffix + ".new")
    draft.write_text(text + "\n", encoding="utf-8")
    os.replace(draft, path)
