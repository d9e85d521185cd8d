"""The script that compares a real model's perplexities pairs windows with those of the full cache."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "quality" / "real_text.py"


def record(method: str, sample: str, score: float, held: float) -> str:
    cell = f"m|{method}|{'' if method == 'full' else '20%'}|auto|text:path=a.txt|aware|7|millpond"
    return json.dumps(
        {"cell": cell, "sample": sample, "score": score, "kv_bytes": held, "full_kv_bytes": 100, "failure": ""}
    )


def test_windows_are_paired_and_unfinished_cells_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = importlib.util.spec_from_file_location("real_text", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    rows = [record("full", str(i), 2.0 + i, 100) for i in range(5)]
    rows += [record("h2o", str(i), 2.1 + i, 20) for i in reversed(range(5))] + [record("window", "0", 3.0, 20)]
    (tmp_path / "samples.jsonl").write_text("\n".join(rows), encoding="utf-8")
    full, h2o = script.compared(script.cells([tmp_path]), windows=5)
    assert "window 20% auto (1 windows)" in capsys.readouterr().out
    assert (full["more"], full["low"], full["high"]) == (0.0, 0.0, 0.0)
    for name in ("more", "low", "high"):  # each window loses as much, however they differ
        assert h2o[name] == pytest.approx(math.exp(0.1) - 1)
    assert (h2o["bytes"], h2o["windows"]) == (0.2, 5)
    assert "| `h2o` | 20% | bf16 | 20.0% | 60.34 | +10.5% | +10.5% to +10.5% |" in script.table([h2o])
    rows_against = script.compared(script.cells([tmp_path]), 5, ("h2o", "20%"))
    (against_h2o,) = (row for row in rows_against if row["method"] == "full")
    assert against_h2o["more"] == pytest.approx(math.exp(-0.1) - 1)
    assert "more than h2o 20%" in script.table([against_h2o], "h2o 20%")
