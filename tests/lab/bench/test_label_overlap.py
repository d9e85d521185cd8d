"""Overlaps of benchmarks/quality/label_overlap.py, on a few texts."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "quality" / "label_overlap.py"
KEPT = Path(__file__).parents[3] / "benchmarks" / "results" / "label-overlap.json"


@pytest.mark.slow
def test_overlaps_of_a_few_texts_are_those_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    to = tmp_path / "overlap.json"
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--texts", "6", "--out", str(to)])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    found, kept = (json.loads(file.read_text(encoding="utf-8"))["overlaps"] for file in (to, KEPT))
    assert set(found) == set(kept)
    for name, layers in found.items():
        means = [sum(map(sum, one)) / sum(map(len, one)) for one in (layers, kept[name])]
        assert means[0] == pytest.approx(means[1], abs=0.1), name
    assert "| all |" in to.with_suffix(".md").read_text(encoding="utf-8")
