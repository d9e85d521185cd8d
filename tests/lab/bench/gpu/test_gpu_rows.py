"""Rows of the GPU benchmarks: written after each cell, read again, errors among them, and no run beyond its time."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[4] / "benchmarks" / "gpu"
sys.path.insert(0, str(FOLDER))
MACHINE = {"card": "a card", "torch": "2.0"}


def module(name: str) -> Any:
    """One of the scripts, which are no package."""
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules[name] = found
    spec.loader.exec_module(found)
    return found


gpu_rows = module("gpu_rows")


def runner(path: Path, seconds: float = 60.0, card: str = "a card") -> Any:
    rows = gpu_rows.RowFile(path, {**MACHINE, "card": card})
    return gpu_rows.CellRunner(rows, gpu_rows.RunClock(seconds), lambda line: None)


def cell(name: str, run: Callable[[], dict[str, Any]], seconds: float = 0.01, section: str = "step") -> Any:
    return gpu_rows.Cell(section, name, run, seconds)


def fails() -> dict[str, Any]:
    raise ValueError("no such kernel")


def test_an_error_is_a_row_and_the_next_cell_runs(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    ran = runner(path)
    ran.run([cell("a", fails), cell("b", lambda: {"ms": 2.0})])
    first, second = gpu_rows.read_rows(path)
    assert first["error"] == "ValueError: no such kernel"
    assert second["ms"] == 2.0
    assert {"card", "torch", "seconds", "section", "cell"} <= set(second)
    assert ran.failed == ["step a"]


def test_a_run_goes_on_from_the_rows_that_are_there(tmp_path: Path) -> None:
    path, ran = tmp_path / "rows.jsonl", []

    def noted(name: str, **figures: Any) -> Any:
        return cell(name, lambda: ran.append(name) or figures)  # type: ignore[func-returns-value]

    runner(path).run([noted("good", ok=True), noted("mismatch", ok=False), cell("error", fails)])
    runner(path).run([noted("good"), noted("mismatch"), noted("error"), noted("new")])
    assert ran == ["good", "mismatch", "mismatch", "error", "new"]
    runner(path, card="another card").run([noted("good")])
    assert ran[-1] == "good"


def test_where_rows_were_measured_is_written_once(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"section": "step", "cell": "old", "card": "an old card"}) + "\n")
    for card, name in (("a card", "a"), ("a card", "b"), ("another card", "a")):
        runner(path, card=card).run([cell(name, lambda: {"ms": 1.0})])
    found = [(row["card"], row.get("torch"), row["cell"]) for row in gpu_rows.read_rows(path)]
    known = [("a card", "2.0", "a"), ("a card", "2.0", "b"), ("another card", "2.0", "a")]
    assert found == [("an old card", None, "old"), *known]
    assert path.read_text().count("torch") == 2


def test_each_row_is_there_before_the_next_cell(tmp_path: Path) -> None:
    path, seen = tmp_path / "rows.jsonl", []

    def look() -> dict[str, Any]:
        seen.append(len(gpu_rows.read_rows(path)))
        return {}

    runner(path).run([cell(name, look) for name in "abc"])
    assert seen == [0, 1, 2]


def test_a_cell_without_time_is_left_out_and_a_shorter_one_runs(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    ran = runner(path, seconds=5.0)
    ran.run([cell("long", lambda: {}, seconds=100.0), cell("short", lambda: {}, seconds=0.1)])
    assert [row["cell"] for row in gpu_rows.read_rows(path)] == ["short"]
    assert ran.left_out == ["step long"]


def test_cells_that_take_longer_than_thought_correct_the_others(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    ran = runner(path, seconds=1.0)
    ran.run([cell("a", lambda: time.sleep(0.6) or {}, seconds=0.2), cell("b", lambda: {}, seconds=0.2)])
    assert ran.left_out == ["step b"]


def test_only_cells_that_hold_a_text_are_run(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    machine = gpu_rows.RowFile(path, MACHINE)
    few = gpu_rows.CellRunner(machine, gpu_rows.RunClock(60.0), print, ["h2o", "full, 16"])
    few.run([cell(name, lambda: {}) for name in ("h2o, 1", "full, 1", "full, 16", "int4, 16")])
    assert [row["cell"] for row in gpu_rows.read_rows(path)] == ["h2o, 1", "full, 16"]


def test_a_cell_ends_with_the_time_of_the_run(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    begin = time.monotonic()
    runner(path, seconds=0.3).run([cell("endless", lambda: time.sleep(30) or {}, seconds=0.1)])
    assert time.monotonic() - begin < 5
    (row,) = gpu_rows.read_rows(path)
    assert row["error"].startswith("CellTimeout")


def test_a_process_that_does_not_heed_the_end_is_ended(tmp_path: Path) -> None:
    code = f"""
import sys; sys.path.insert(0, {str(FOLDER)!r})
import gpu_rows, time
gpu_rows.GRACE = 0.2
def stubborn():
    while True:
        try:
            time.sleep(30)
        except gpu_rows.CellTimeout:
            pass
rows = gpu_rows.RowFile(__import__('pathlib').Path({str(tmp_path / "rows.jsonl")!r}), {MACHINE!r})
gpu_rows.CellRunner(rows, gpu_rows.RunClock(0.2)).run([gpu_rows.Cell("step", "a", stubborn, 0.1)])
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=20, check=False).returncode == 124


@pytest.mark.slow
def test_every_section_runs_in_small_on_a_cpu(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="Triton is not installed (pip install 'millpond[gpu]')")
    command = [sys.executable, "-W", "ignore", FOLDER / "run_all.py", "--dry-run", "--out", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    rows = gpu_rows.read_rows(tmp_path / "gpu-rows.jsonl")
    wanted = {"rates", "profile", "step", "steady", "served", "prompt", "generate", "kernels"}
    wanted |= {"offload", "latency", "storage"}
    wanted |= {f"tokens: {part}" for part in ("methods", "codecs", "engine", "places")}
    assert {row["section"] for row in rows} == wanted
    assert all(row["ok"] for row in rows if row["section"].startswith("tokens"))
    bounded = ("step", "steady", "prompt", "generate", "latency", "storage")
    assert all(row["ratio"] > 0 for row in rows if row["section"] in bounded)
    assert all(row["bound_tokens_per_s"] > 0 for row in rows if row["section"] in ("steady", "served"))
    assert all(row["bound_ms"] > 0 for row in rows if row["section"] == "offload" and "accelerate" not in row["cell"])
    assert "goal: steady h2o 20%: at least 3 x full: " in done.stdout
