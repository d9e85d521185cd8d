"""Plans as files, which `serve --layout` reads: workers by role, and nothing that is damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from millpond.cluster.layout_file import PlannedWorkers, load_plan
from millpond.errors import DataError, OptionError

GOOD: dict[str, Any] = {"format": 1, "workers": [{"role": "prefill", "devices": 1}, {"role": "decode", "devices": 1}]}


def written(path: Path, data: Any) -> str:
    path.write_text(data if isinstance(data, str) else json.dumps(data), encoding="utf-8")
    return str(path)


def test_workers_of_a_plan_by_role(tmp_path: Path) -> None:
    assert load_plan(written(tmp_path / "one.json", GOOD)) == PlannedWorkers(0, 1, 1, 1)
    both = {"format": 1, "workers": [{"role": "both", "devices": 2}], "copies": 3}
    assert load_plan(written(tmp_path / "both.json", both)) == PlannedWorkers(3, 0, 0, 2)


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2},
        {"workers": []},
        {"workers": {}},
        {"workers": [1]},
        {"workers": [{"role": "both"}]},
        {"workers": [{"role": "boss", "devices": 1}]},
        {"workers": [{"role": "both", "devices": True}]},
        {"workers": [{"role": ["both"], "devices": 1}]},
        {"workers": [{"role": "prefill", "devices": 1}]},
        {"copies": 0},
        {"copies": 10**9},
        {"copies": "2"},
        {"copies": 1.5},
    ],
)
def test_a_damaged_plan_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(DataError):
        load_plan(written(tmp_path / "plan.json", GOOD | change))


def test_what_is_no_plan_is_refused(tmp_path: Path) -> None:
    for text in ("{", "[1]", "[" * 100_000, " " * (2**20 + 1)):
        with pytest.raises(DataError):
            load_plan(written(tmp_path / "plan.json", text))
    with pytest.raises(OptionError):
        load_plan(str(tmp_path / "none.json"))
