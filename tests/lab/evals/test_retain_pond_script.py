"""benchmarks/quality/retain_pond.sh: the commands of its evaluations, with programs that only write down."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from millpond_lab.evals.harness.plan import EvalPlan
from millpond_lab.evals.spec import parse_specs, words
from millpond_lab.train.text.data import HELD_OUT

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "quality" / "retain_pond.sh"
#: A program that notes its arguments.
PROGRAM = '#!/bin/sh\n{ printf "%s\\n" "$@"; echo; } >> "$LOG-$$"\n'


def called(folder: Path, part: str) -> list[dict[str, str]]:
    """The options of each call of a part."""
    for name in ("millpond", "python"):
        (folder / name).write_text(PROGRAM, encoding="utf-8")
        (folder / name).chmod(0o755)
    known = {"PATH": os.environ["PATH"], "BIN": os.path.relpath(folder, SCRIPT.parents[2]), "DATA": str(folder)}
    known |= {"LOG": str(folder / "log"), "OUT": str(folder / "out")}
    subprocess.run(["sh", str(SCRIPT), part], env=known, check=True, capture_output=True)
    calls = [file.read_text(encoding="utf-8").strip().splitlines() for file in sorted(folder.glob("log-*"))]
    return [dict(zip(call[1::2], call[2::2], strict=True)) for call in calls]


@pytest.mark.parametrize(
    ("part", "protocol", "task"),
    [("newest", "aware", "text"), ("text", "aware", "text"), ("recall", "agnostic", "pond_facts")],
)
def test_evaluations_compare_with_the_full_cache_on_held_out_books(
    part: str, protocol: str, task: str, tmp_path: Path
) -> None:
    cells = []
    for said in called(tmp_path, part):
        plan = EvalPlan(
            said["--model"],
            parse_specs(said["--method"], "method"),
            parse_specs(said["--tasks"], "tasks"),
            words(said["--budget"], "budget") if "--budget" in said else None,
            ["auto"],
            words(said.get("--protocol", "aware"), "protocol"),
            int(said["--samples"]),
            int(said["--seed"]),
        )
        assert all(spec.options.get("path", spec.options.get("essay")) in HELD_OUT for spec in plan.tasks)
        cells += plan.cells()
    assert {(cell.protocol, cell.task.partition(":")[0]) for cell in cells} == {(protocol, task)}
    methods = {cell.method.partition(":")[0] for cell in cells}
    assert {"full", "locret", "ada"} <= methods
    assert part == "newest" or "attention_gate" in methods
    assert len({cell.key for cell in cells}) == len(cells)


def test_the_newest_entries_are_chosen_on_another_book(tmp_path: Path) -> None:
    tasks = []
    for part in ("newest", "text"):
        (tmp_path / part).mkdir()
        tasks.append({said["--tasks"] for said in called(tmp_path / part, part)})
    assert not tasks[0] & tasks[1]


def test_an_unknown_part_is_refused(tmp_path: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError):
        called(tmp_path, "everything")
