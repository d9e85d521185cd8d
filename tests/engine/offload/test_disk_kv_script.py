"""The script that times KV on a disk runs each version in turn."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "performance" / "disk_kv.py"


@pytest.mark.slow
def test_versions_are_compared_and_read_the_same_bytes(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    command = [sys.executable, str(SCRIPT), "--tiny", "--method", "h2o", "--requests", "3", "--prompt", "70"]
    paths = ["--folder", str(tmp_path / "model"), "--json", str(out)]
    subprocess.run([*command, *paths, "--python", sys.executable, sys.executable], check=True)
    found = json.loads(out.read_text())
    assert [row["version"] for row in found["results"]] == [0, 1]
    first, second = (row["runs"][0] for row in found["results"])
    assert first["step_kv_bytes"] == second["step_kv_bytes"] > 0
    assert first["step_s"] > first["step_core_s"] > 0
    assert str(tmp_path) not in out.read_text()
