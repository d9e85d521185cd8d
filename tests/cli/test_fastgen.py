"""The commands hand the model's own tokenizer to a method that looks at tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from millpond.cli.app import app
from millpond_lab.evals.harness.plan import EvalPlan
from millpond_lab.evals.harness.store import RUN, SAMPLES
from millpond_lab.evals.spec import parse_specs


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "160", "NO_COLOR": "1"})
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("budget", [(), ("--budget", "30%")])
def test_generate(budget: tuple[str, ...]) -> None:
    text = ("--prompt", "Anna has the key .", "--max-new-tokens", "3")
    for method in ("fastgen", "kvzip"):
        assert "held" in run("generate", *text, "--method", method, *budget)


def test_eval(tmp_path: Path) -> None:
    run(
        "eval",
        "--tasks",
        "niah_single:length=200",
        "--method",
        "fastgen:threshold=0.9,kvzip",
        "--samples",
        "2",
        "--threads",
        "1",
        "--out",
        str(tmp_path),
    )
    cells = json.loads((tmp_path / RUN).read_text())["cells"]
    assert [(cell["method"], cell["budget"]) for cell in cells] == [("fastgen:threshold=0.9", ""), ("kvzip", "20%")]
    assert len((tmp_path / SAMPLES).read_text().splitlines()) == 4


def test_only_what_needs_a_budget_gets_one() -> None:
    tasks = parse_specs("niah_single:length=200", "tasks")
    plan = EvalPlan("pond-recall", parse_specs("full,h2o,fastgen", "method"), tasks)
    assert [cell.budget for cell in plan.cells()] == ["", "20%", ""]
    capped = EvalPlan("pond-recall", plan.methods, plan.tasks, ["10%"])
    assert [cell.budget for cell in capped.cells()] == ["", "10%", "10%"]
