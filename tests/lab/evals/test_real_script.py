"""benchmarks/quality/real.sh: the commands of its parts that ask questions, with programs that only write down."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from millpond_lab.evals.harness.plan import EvalPlan
from millpond_lab.evals.spec import parse_specs, words

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "quality" / "real.sh"
#: A program that notes its arguments, and writes the table that `quick` shows.
PROGRAM = """#!/bin/sh
{ echo "$(basename "$0")"; printf "%s\\n" "$@"; echo; } >> "$LOG-$$"
case $1 in *real_text.py) seq 20 > "$OUT/quick.md" ;; esac
"""


def called(folder: Path, part: str) -> tuple[list[list[str]], str]:
    """The calls of one part, program and arguments, and what the part prints."""
    for name in ("millpond", "python"):
        (folder / name).write_text(PROGRAM, encoding="utf-8")
        (folder / name).chmod(0o755)
    # the script takes BIN from the checkout's root on
    known = {"PATH": os.environ["PATH"], "BIN": os.path.relpath(folder, SCRIPT.parents[2]), "DATA": str(folder)}
    known |= {"LOG": str(folder / "log"), "OUT": str(folder / "out")}
    done = subprocess.run(["sh", str(SCRIPT), part], env=known, check=True, capture_output=True, text=True)
    calls = [file.read_text(encoding="utf-8").strip().splitlines() for file in sorted(folder.glob("log-*"))]
    return calls, done.stdout


def plan(call: list[str]) -> EvalPlan:
    """What `millpond eval` would run."""
    said = dict(zip(call[2::2], call[3::2], strict=True))
    return EvalPlan(
        said["--model"],
        parse_specs(said["--method"], "method"),
        parse_specs(said["--tasks"], "tasks"),
        words(said["--budget"], "budget") if "--budget" in said else None,
        [said.get("--codec", "auto")],
        words(said.get("--protocol", "aware"), "protocol"),
        int(said["--samples"]),
        int(said["--seed"]),
    )


@pytest.mark.parametrize(
    ("part", "protocols", "tasks"),
    [
        ("recall", {"aware", "agnostic"}, {"prose_facts"}),
        ("turns", {"turns"}, {"prose_facts"}),
        ("xsum", {"aware"}, {"h2o_summary"}),
        ("gsm8k", {"aware"}, {"gsm8k"}),
        ("multi-news", {"aware"}, {"longbench"}),
    ],
)
def test_the_parts_that_ask_compare_with_the_full_cache(
    part: str, protocols: set[str], tasks: set[str], tmp_path: Path
) -> None:
    calls, _ = called(tmp_path, part)
    plans = [plan(call) for call in calls]
    cells = [cell for made in plans for cell in made.cells()]
    assert {cell.protocol for cell in cells} == protocols
    assert {cell.task.partition(":")[0] for cell in cells} == tasks
    for asked in {(cell.task, cell.protocol) for cell in cells}:
        own = [cell for cell in cells if (cell.task, cell.protocol) == asked]
        assert [cell.method for cell in own].count("full") == 1
        assert ("h2o", "60%", "rotated4") in {(cell.method, cell.budget, cell.codec) for cell in own}
        assert {"h2o", "snapkv", "window"} <= {cell.method for cell in own if cell.budget == "20%"}
        if asked[1] != "aware":
            assert "oracle" not in {cell.method for cell in own}


def test_quick_takes_few_windows_and_prints_five_rows(tmp_path: Path) -> None:
    calls, said = called(tmp_path, "quick")
    runs = [plan(call) for call in calls if call[0] == "millpond"]
    (table,) = [call for call in calls if call[0] == "python"]
    assert {run.samples for run in runs} == {int(table[table.index("--windows") + 1])} == {8}
    assert ("full", "") in {(cell.method, cell.budget) for run in runs for cell in run.cells() if cell.codec == "auto"}
    assert said.splitlines()[-1] == "9"  # title, blank, head, rule, five rows
