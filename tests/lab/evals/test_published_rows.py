"""benchmarks/quality/published_rows.py: the file of rows, what is skipped, resumed and judged."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from millpond.errors import DataError, OptionError
from millpond_lab.evals.decoding.record import Record
from millpond_lab.evals.spec import Spec
from tests.helpers.evals.small import save_tiny
from tests.helpers.evals.task_help import write_rows
from tests.lab.evals.test_ruler_files import row as ruler_row
from tests.lab.evals.test_ruler_files import small_words

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "quality" / "published_rows.py"


@pytest.fixture(scope="module")
def program() -> dict[str, Any]:
    """Not `run_path`: dataclasses look their module up."""
    import importlib.util

    spec = importlib.util.spec_from_file_location("published_rows", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["published_rows"] = module
    spec.loader.exec_module(module)
    return vars(module)


@pytest.fixture
def published(program: dict[str, Any]) -> Any:
    return program["Published"]("one", "P", "1", "s", "m", 4096, 6500, "window", "20%", 0.8, 94.9, 1.0, 95.7)


def found(**changes: Any) -> dict[str, Any]:
    same = {"full": [95.6, 95.2, 96.0], "compressed": [95.0, 94.6, 95.4], "lost": [0.6, 0.4, 0.9]}
    return {"model": "m", "length": 4096, "failures": 0, "tasks": "RULER's files", **same, **changes}


def test_the_rows_are_whole_and_each_method_is_ours_or_skipped(program: dict[str, Any]) -> None:
    rows = program["read_rows"]()
    settings = program["Settings"](samples=1)
    names, skipped = set(), set()
    for row in rows:
        names.add(row.name)
        assert 0 < row.removed < 1
        assert row.budget in ("", f"{1 - row.removed:.0%}")
        assert row.compressed <= (row.full or 100)
        assert row.source
        assert row.arxiv
        try:
            assert len(settings.plan(row, chat=False).cells()) == 2 * 11
        except OptionError as error:
            skipped.add((row.paper, str(error)[:22]))
    assert {"kvzip-80", "kvzap-llama-4k", "defensivekv-layer"} <= names
    assert skipped <= {("KVzap", "unknown method 'kvzap'")}


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ('[[rows]]\nname = "a"\ncolour = 1\n', "row 1: unknown field 'colour'"),
        ('[[rows]]\nname = "a"\n', "row 1: .*missing"),
    ],
)
def test_a_row_that_is_not_whole_is_refused(program: dict[str, Any], tmp_path: Path, text: str, match: str) -> None:
    (tmp_path / "rows.toml").write_text(text)
    with pytest.raises(DataError, match=match):
        program["read_rows"](tmp_path / "rows.toml")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "within: full, compressed, lost"),
        ({"compressed": [93.0, 92.5, 93.5], "lost": [2.6, 2.0, 3.0]}, "outside: compressed, lost"),
        ({"compressed": [95.0, 80.0, 99.0]}, "undecided: compressed; the intervals are too wide, raise --samples"),
        ({"tasks": "made here", "full": [60.0, 50.0, 70.0], "compressed": [59.4, 49.0, 69.0]}, "within: lost"),
        ({"model": "other"}, "another model: published figures are not comparable"),
        ({"length": 1024}, "another length: published figures are not comparable"),
        ({"failures": 2}, "undecided: 2 questions failed"),
    ],
)
def test_a_verdict_is_of_whole_intervals(
    program: dict[str, Any], published: Any, changes: dict[str, Any], said: str
) -> None:
    assert program["verdict"](published, found(**changes)) == said


def test_without_a_full_figure_tasks_made_here_say_nothing(program: dict[str, Any], published: Any) -> None:
    from dataclasses import replace

    row = replace(published, full=None)
    assert program["verdict"](row, found(tasks="made here")).startswith("not comparable")
    assert program["verdict"](row, found()) == "within: compressed"


def test_figures_pair_the_questions_of_each_task(program: dict[str, Any]) -> None:
    def records(*scores: float) -> list[Record]:
        return [Record("", f"s{i}", 0, "", score, 1.0, 9, 0.25, 1, 4) for i, score in enumerate(scores)]

    made = program["figures"](
        {"a": records(1, 1), "b": records(0.5, 1)}, {"b": records(0, 0.5)[::-1], "a": records(1, 0)}
    )
    assert (made["full"][0], made["compressed"][0], made["lost"][0]) == (87.5, 37.5, 50.0)
    assert made["lost"][1] < 50 < made["lost"][2]
    assert (made["n"], made["failures"], made["removed"]) == (4, 0, 0.75)


def test_files_are_run_once_and_what_is_missing_is_skipped_with_a_reason(
    tmp_path: Path, program: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(program, "FILES", ("vt", "qa_1"))
    for name, asked in (("vt", "\nQuestion: What is"), ("qa_1", program["QA_BEGINS"])):
        folder = tmp_path / "ruler" / "64" / name
        folder.mkdir(parents=True)
        text = ruler_row()["input"].replace("\nWhat is", asked)
        write_rows(folder / "validation.jsonl", [ruler_row(input=text)])
    model, out = save_tiny(tmp_path / "tiny"), tmp_path / "out"
    small_words().save_pretrained(model)
    given = ["--model", model, "--ruler", tmp_path / "ruler", "--length", 64, "--samples", 1, "--dtype", "auto"]
    given += ["--device", "cpu", "--out", out, "--set", "kvzap:nothing=1"]

    def run(*arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", ["published_rows.py", *map(str, [*given, *arguments])])
        program["main"]()
        return capsys.readouterr().out

    said = run("--rows", "snapkv-25,kvzap-llama-4k")
    assert "snapkv-25: another model: published figures are not comparable" in said
    assert "kvzap-llama-4k: skipped: " in said
    assert "| snapkv-25 | SnapKV, arXiv:2404.14469 | ? to 81.8 (removed 25%) | " in said
    (line,) = [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]
    assert (line["n"], line["samples"], line["tasks"]) == (2, 1, "RULER's files")
    assert line["hardware"]
    with (out / "rows.jsonl").open("a") as file:
        file.write('{"row": "half')
    monkeypatch.setitem(program, "run", lambda *_: pytest.fail("run again"))
    assert "another model" in run("--rows", "snapkv-25")
    assert len((out / "rows.jsonl").read_text().splitlines()) == 1
    assert "validation.jsonl is not there; RULER's scripts write it" in run("--rows", "kvzip-80", "--length", 128)
    with pytest.raises(SystemExit, match="unknown row 'kvzip-8'; did you mean"):
        run("--rows", "kvzip-8")


def test_options_are_added_to_rows_of_their_method(program: dict[str, Any], published: Any) -> None:
    settings = program["Settings"](options=(Spec.parse("window:sinks=2"), Spec.parse("h2o:sinks=1")))
    assert str(settings.method(published)) == "window:sinks=2"
    assert settings.key(published)["method"] == "window:sinks=2"
    chat = settings.tasks(published, chat=True)["vt"]
    assert chat.options == {"of": "tracking:length=4096", "messages": "1"}
