"""The turns of benchmarks/performance/codec_turns.py, small."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "performance" / "codec_turns.py"


def test_codecs_go_on_in_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    to = tmp_path / "turns.json"
    asked = f"--tiny --codec int4 --prompt 200 --tokens 40 --rounds 3 --threads {torch.get_num_threads()} --json {to}"
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *asked.split()])
    monkeypatch.syspath_prepend(SCRIPT.parent)  # as Python does for a script
    runpy.run_path(str(SCRIPT), run_name="__main__")
    plain, codes = json.loads(to.read_text(encoding="utf-8"))["results"]
    assert (plain["codec"], plain["of_bf16"]) == ("bf16", 1.0)
    assert codes["codec"] == "int4"
    assert codes["of_bf16"] > 0
    assert codes["kv_bytes"] < 0.6 * plain["kv_bytes"]
