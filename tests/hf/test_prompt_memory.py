"""What a long prompt takes at its highest point, in processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "performance" / "prompt_memory.py"


def peaks(folder: Path, *options: str, runs: int = 1) -> dict[str, float]:
    """Bytes above the start by cache."""
    out = folder / "found.json"
    subprocess.run([sys.executable, str(SCRIPT), "--runs", str(runs), "--json", str(out), *options], check=True)
    return {row["cache"]: row["peak_bytes"] for row in json.loads(out.read_text())["results"]}


@pytest.mark.slow
def test_the_script_measures_each_cache(tmp_path: Path) -> None:
    found = peaks(tmp_path, "--tiny", "--prompt", "128", "--new", "2", "--only", "full")
    assert list(found) == ["full"]
    assert found["full"] > 0


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="peaks are read from /proc")
def test_a_long_prompt_does_not_grow_the_heap_at_each_layer(tmp_path: Path) -> None:
    """4,096 tokens of 12 layers: 50 MB of entries, and 100 to 130 MB of temporaries of one layer."""
    found = peaks(tmp_path, "--only", "full", "--only", "h2o 20%", "--only", "h2o 20%, chunks", runs=3)
    assert found["full"] < 330e6
    assert found["h2o 20%"] < 300e6
    assert found["h2o 20%, chunks"] < 110e6
