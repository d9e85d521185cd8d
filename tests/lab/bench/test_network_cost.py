"""The turns of benchmarks/performance/network_cost.py, small."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "performance" / "network_cost.py"


def test_networks_are_compared_with_drawn_scores_and_h2o(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    to = tmp_path / "cost.json"
    given = f"--tiny --prompt 128 --tokens 8 --rounds 3 --threads {torch.get_num_threads()} --json {to}"
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *given.split()])
    monkeypatch.syspath_prepend(SCRIPT.parent)  # as Python does for a script
    runpy.run_path(str(SCRIPT), run_name="__main__")
    found = json.loads(to.read_text(encoding="utf-8"))
    rows = {(row["name"], row["base"]): row for row in found["results"]}
    drawn = {"locret": "locret, scores drawn", "attention_gate": "attention_gate, scores drawn"}
    assert set(rows) == {pair for name, own in drawn.items() for pair in ((name, own), (name, "h2o"), (own, "h2o"))}
    for row in rows.values():
        for part in ("prompt", "step"):
            low, high = row[part]["quartiles"]
            assert 0 < low <= row[part]["median"] <= high
    assert found["parameters"]["attention_gate"] > 0.9 * found["parameters"]["locret"] > 0
