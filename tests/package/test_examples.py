"""The examples: each runs with the bundled model, answers rightly, and is listed."""

from __future__ import annotations

import ast
import json
import re
import runpy
import sys
from pathlib import Path

import pytest

from tests.helpers.models import REAL, needs_real_model

EXAMPLES = Path(__file__).parents[2] / "examples"
NOTEBOOK = EXAMPLES / "inspector.ipynb"
SCRIPTS = ("batch_engine", "compare_methods", "long_document", "openai_client", "quickstart")
LINES = 60


def run(name: str, patch: pytest.MonkeyPatch, *arguments: str) -> None:
    """The script as `python examples/NAME.py` runs it, in this process: torch is imported once for all of them."""
    patch.syspath_prepend(EXAMPLES)
    patch.delitem(sys.modules, "facts", raising=False)
    patch.setattr(sys, "argv", [f"{name}.py", *arguments])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")


def test_all_are_listed_and_short() -> None:
    page = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    there = {path.stem for path in EXAMPLES.glob("*.py")} - {"facts"}
    assert there == set(SCRIPTS)
    for script in there:
        assert f"[{script}.py]({script}.py)" in page
        assert len((EXAMPLES / f"{script}.py").read_text(encoding="utf-8").splitlines()) < LINES
    assert f"[{NOTEBOOK.name}]({NOTEBOOK.name})" in page


def test_quickstart(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run("quickstart", monkeypatch)
    full, compressed = re.findall(r"^(\w+) +'clara mirror', from ([\d.]+) MB", capsys.readouterr().out, re.MULTILINE)
    assert (full[0], compressed[0]) == ("full", "snapkv")
    assert float(compressed[1]) < float(full[1]) / 4


def test_long_document(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run("long_document", monkeypatch)
    answers = re.findall(r"'\w+ (\w+)' in [\d.]+ s \(it should be '(\w+)'\)", capsys.readouterr().out)
    assert answers == [("ladder", "ladder"), ("button", "button")]


def test_batch_engine(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run("batch_engine", monkeypatch)
    rows = re.findall(r"^(\w+) +(\d+)/24 +[\d.]+ +([\d.]+)$", capsys.readouterr().out, re.MULTILINE)
    assert [(method, right) for method, right, _ in rows] == [("full", "24"), ("snapkv", "24")]
    assert float(rows[1][2]) < float(rows[0][2]) / 4


def test_compare_methods(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run("compare_methods", monkeypatch, "--methods", "window", "snapkv", "--budgets", "20%")
    rows = dict(re.findall(r"^(\w+) +\S+ +(\d)/8", capsys.readouterr().out, re.MULTILINE))
    assert (rows["full"], rows["snapkv"]) == ("8", "8")
    assert int(rows["window"]) < int(rows["snapkv"])


@pytest.mark.slow
def test_openai_client(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("openai", reason="pip install openai")
    pytest.importorskip("fastapi", reason="pip install 'millpond[server]'")
    run("openai_client", monkeypatch)
    written = capsys.readouterr().out
    assert "anna kettle" in written
    assert "boris ladder" in written


#: What each prints with a model that answers questions in English: a line's pattern, and how many such lines.
REAL_LINES = {
    "batch_engine": (r"^(full|snapkv) +\d+/24 ", 2),
    "compare_methods": (r"^(full|snapkv) +\S+ +\d/8 ", 2),
    "long_document": (r"^'Question.*': '\w+.*' in ", 2),
    "openai_client": (r"tokens of prompt, \d+ written", 2),
    "quickstart": (r"^(full|snapkv) +'mirror", 2),
}


@pytest.mark.slow
@needs_real_model
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_real_model_runs_too(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    memory = ("--kv-memory", "256MiB") if script == "batch_engine" else ()
    few = ("--methods", "snapkv", "--budgets", "30%") if script == "compare_methods" else ()
    run(script, monkeypatch, "--model", str(REAL), *memory, *few)
    pattern, lines = REAL_LINES[script]
    assert len(re.findall(pattern, capsys.readouterr().out, re.MULTILINE)) == lines


def test_the_notebook_is_small_and_holds_no_results() -> None:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    assert NOTEBOOK.stat().st_size < 10_000
    assert not any(cell.get("outputs") for cell in cells)


@pytest.mark.slow
def test_the_notebook_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.delitem(sys.modules, "facts", raising=False)
    names: dict[str, object] = {"__name__": "__main__"}
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    *first, last = ast.parse("\n".join(code)).body
    exec(compile(ast.Module(first, []), NOTEBOOK.name, "exec"), names)
    assert isinstance(last, ast.Expr)
    shown = eval(compile(ast.Expression(last.value), NOTEBOOK.name, "eval"), names)
    assert "<iframe srcdoc=" in shown._repr_html_()
    written = capsys.readouterr().out
    assert "clara mirror" in written
    assert "mirror kept" in written
    assert "mirror evicted" in written
