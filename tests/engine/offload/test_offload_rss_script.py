"""Offloading keeps to its limit as the system sees it: the peak of a process above where it opened the model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "performance" / "offload_rss.py"
NAMES = ("searched", "layers from the disk", "a third of the layers kept", "KV on the disk", "int4, ends on the disk")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, int]]:
    out = tmp_path_factory.mktemp("rss") / "rows.json"
    subprocess.run([sys.executable, str(SCRIPT), "--json", str(out)], check=True, cwd=SCRIPT.parent)
    return {row["plan"]: row for row in json.loads(out.read_text())["results"]}


@pytest.mark.parametrize("name", NAMES)
def test_the_peak_is_at_most_a_twentieth_and_16_mib_above_the_limit(name: str, rows: dict[str, dict[str, int]]) -> None:
    assert set(rows) == set(NAMES)
    assert rows[name]["peak"] <= rows[name]["limit"] * 1.05 + (16 << 20)
