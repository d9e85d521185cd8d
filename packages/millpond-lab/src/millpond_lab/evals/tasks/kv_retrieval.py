"""Key-value retrieval from a JSON object (Liu et al., "Lost in the Middle", arXiv:2307.03172)."""

from __future__ import annotations

import json
from typing import Annotated, Any

from millpond.errors import OptionError
from millpond.option_ranges import MAX_POSITIONS, Range
from millpond_lab.evals.data.data_files import DataRow, read_rows
from millpond_lab.evals.data.file_task import FileTask
from millpond_lab.evals.data.token_budget import TokenBudget
from millpond_lab.evals.metrics import found
from millpond_lab.evals.sample import Question, Sample
from millpond_lab.evals.task import Task, task

_INTRO = "Read the value of one key out of the JSON object below.\n\nJSON data:\n"


@task("kv_retrieval", paper="arXiv:2307.03172")
def kv_retrieval(
    path: Annotated[str, "a file with ordered_kv_records (a list of [key, value]), key and value; may end in .gz"] = "",
    gold: Annotated[
        int, "where the wanted pair stands, from 0; -1: where the file has it", Range(-1, MAX_POSITIONS)
    ] = -1,
) -> Task:
    """Read one value out of a long JSON object of random keys."""
    if gold < -1:
        raise OptionError(f"kv_retrieval: gold={gold} must be a place from 0, or -1 for the file's own")

    def make(row: DataRow, room: TokenBudget) -> Sample:
        key, value = row.words("key"), row.words("value")
        records = _records(row)
        if [key, value] not in records:
            raise row.error("key", f"{key!r} with the field 'value' is not among ordered_kv_records")
        place = records.index([key, value])
        if gold >= 0:
            if gold >= len(records):
                raise OptionError(f"kv_retrieval: gold={gold}, and row {row.number} has {len(records)} pairs; lower it")
            records.insert(gold, records.pop(place))
            place = gold
        lines = ",\n ".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in records)
        question = Question(f'\n\nKey: "{key}"\nIts value:', (value,), 64)
        facts = {"pairs": len(records), "depth": round(place / max(len(records) - 1, 1), 3)}
        return Sample(row.name, f"{_INTRO}{{{lines}}}", (question,), facts)

    return FileTask("kv_retrieval", lambda: read_rows(path), make, lambda q, answer: found(q.references, answer))


def _records(row: DataRow) -> list[list[str]]:
    value: Any = row.fields.get("ordered_kv_records")
    if not isinstance(value, list) or not value or not all(_is_pair(each) for each in value):
        raise row.error("ordered_kv_records", "must be a list of [key, value] pairs of text")
    return [list(each) for each in value]


def _is_pair(each: Any) -> bool:
    return isinstance(each, list) and len(each) == 2 and all(isinstance(part, str) for part in each)
