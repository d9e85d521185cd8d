"""The script that runs plans of offloading: what it draws fits, runs, and is reported without a path."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "performance" / "offload_plans.py"


@pytest.mark.slow
def test_random_plans_and_schedules_are_run(tmp_path: Path) -> None:
    pytest.importorskip("scipy")
    out = tmp_path / "found.json"
    command = [sys.executable, str(SCRIPT), "--folder", str(tmp_path / "model"), "--json", str(out)]
    subprocess.run([*command, "--only", "random,schedules", "--plans", "1", "--rounds", "1"], check=True)
    found = json.loads(out.read_text())
    assert len(found["random"]["plans"]) == 1
    assert {plan["schedule"] for plan in found["schedules"]["plans"]} == {"row", "zigzag"}
    assert found["schedules"]["ratio"] > 0
    assert str(tmp_path) not in out.read_text()
