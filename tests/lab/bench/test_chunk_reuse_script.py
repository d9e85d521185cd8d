"""The script of the page of stored chunks: every part in small, and a run that goes on where one stopped."""

from __future__ import annotations

import importlib
import json
from argparse import Namespace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

QUALITY = Path(__file__).parents[3] / "benchmarks" / "quality"
IDS = np.random.default_rng(0).integers(1, 500, 400)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(QUALITY))
    return importlib.import_module("chunk_reuse")


def arguments(part: str, **changed: Any) -> Namespace:
    sizes: dict[str, Any] = {
        "windows": 2,
        "chunks": 3,
        "tokens": 12,
        "suffix": 4,
        "context": 8,
        "rest": ["auto", "int8"],
    }
    counts = {"queries": 5, "seeds": 1, "repeats": 1, "seed": 0, "threads": 1}
    return Namespace(text=Path("a.txt"), part=part, model="random", **sizes | counts | changed)


@pytest.mark.parametrize("part", ["picks", "formats", "focus", "variants"])
def test_parts_of_windows(script: ModuleType, part: str, tmp_path: Path) -> None:
    script.run_windows(IDS, arguments(part), script.Kept(tmp_path / part, {}))
    written = json.loads((tmp_path / f"{part}.json").read_text())
    rows = {row["setting"]: row for row in written["rows"]}
    assert len(written["units"]) == 2
    assert all(name in (tmp_path / f"{part}.md").read_text() for name in rows)
    if part == "variants":
        assert rows["kept, round 2"]["computed"] == 0 < rows["none, round 2"]["computed"]
        assert rows["kept, round 1"]["computed"] == rows["none, round 1"]["computed"]
    if part == "focus":
        assert rows["alpha 0.17, focus 0"]["fewer_row_layers"] == 0
    if part == "picks":
        assert rows["behind / attention 30%"]["computed"] > rows["behind / attention 5%"]["computed"]
        assert rows["behind / nothing"]["kl"] > 0
    if part == "formats":
        assert rows["the same prompt, float32"]["kl"] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("part", ["zipf", "preload"])
def test_parts_of_streams(script: ModuleType, part: str, tmp_path: Path) -> None:
    script.STREAMS[part](arguments(part), script.Kept(tmp_path / part, {}))
    rows = json.loads((tmp_path / f"{part}.json").read_text())["rows"]
    if part == "zipf":
        assert {row["rule"]: row["bytes"] > row["tokens"] > 0 for row in rows} == {"lru": True, "craft": True}
    else:
        assert [row["load, read first"] > 0 for row in rows] == [True] * 3


def test_a_run_goes_on_with_the_same_settings_alone(script: ModuleType, tmp_path: Path) -> None:
    out, measured = tmp_path / "rows", []

    def measure() -> list[int]:
        measured.append(1)
        return [len(measured)]

    assert [script.Kept(out, {"seed": 1}).unit("one", measure) for _ in range(2)] == [[1], [1]]
    again = script.Kept(out, {"seed": 1})
    assert again.unit("two", measure) == [2]
    assert again.units == {"one": [1], "two": [2]}
    assert script.Kept(out, {"seed": 2}).unit("one", measure) == [3], "rows of other settings are no rows of these"


def test_ratios_have_an_interval(script: ModuleType) -> None:
    middle, low, high = script.ratio(np.array([1.0, 3.0]), np.array([2.0, 2.0]))
    assert (middle, low, high) == (1.0, 0.5, 1.5)
    assert script.interval((middle, low, high)) == "1.00 [0.50, 1.50]"
