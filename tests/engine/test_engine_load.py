"""The load of benchmarks/performance/engine_load.py, small: pages that a budget saves let more requests run."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "performance" / "engine_load.py"


def test_a_budget_lets_more_requests_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    to = tmp_path / "load.json"
    asked = "--tiny --prompt 160 --answer 24 --requests 9 --whole 3 --step-tokens 256 --methods full h2o"
    asked += f" --threads {torch.get_num_threads()}"
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *asked.split(), "--json", str(to)])
    monkeypatch.syspath_prepend(SCRIPT.parent)  # as Python does for a script
    runpy.run_path(str(SCRIPT), run_name="__main__")
    told = json.loads(to.read_text(encoding="utf-8"))
    full, h2o = told["results"]
    assert full["most_in_flight"] == 3
    assert h2o["most_in_flight"] >= 2 * full["most_in_flight"]
    assert all(load["tokens_per_s"] > 0 and load["read_s"] > 0 for load in (full, h2o))
