"""`millpond eval` from end to end, on a folder and on the bundled model."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from millpond.cli.app import app
from millpond.methods import METHODS
from millpond_lab.evals.sample import Sample
from millpond_lab.evals.task import TASKS, task
from tests.helpers.cli.plugin import MODULE, PLUGIN, plugin  # noqa: F401
from tests.helpers.evals.small import TinyTask, save_tiny, tiny_samples


@pytest.fixture(autouse=True)
def tiny_tasks() -> Iterator[None]:
    TASKS.names()

    @task("tiny")
    def tiny() -> TinyTask:
        """Answers by decoding."""
        return TinyTask(items=tiny_samples(4))

    yield
    del TASKS._entries["tiny"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["eval", *arguments], env={"COLUMNS": "160", "NO_COLOR": "1"})


def test_a_local_model_from_end_to_end(folder: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = [
        "--model",
        folder,
        "--method",
        "full,h2o:recent=0.25,window",
        "--budget",
        "30%,7",
        "--tasks",
        "tiny",
        "--samples",
        "3",
        "--seed",
        "7",
        "--protocol",
        "aware,agnostic,turns",
        "--batch-size",
        "5",
        "--device",
        "cpu",
        "--out",
        str(out),
    ]
    result = call(*arguments)
    assert result.exit_code == 0, result.output + str(result.exception)
    rows = json.loads((out / "summary.json").read_text())
    assert len(rows) == 3 * 5
    assert {row["protocol"] for row in rows} == {"aware", "agnostic", "turns"}
    assert all(row["n"] == 9 and row["seed"] == 7 and row["failures"] == 0 for row in rows)
    assert "h2o:recent=0.25" in result.stdout
    assert f"Written to {out}" in result.stdout
    assert "warning" not in result.stderr
    assert "never used" not in result.stderr
    noted = json.loads((out / "run.json").read_text())["runs"]
    assert noted[0]["hardware"]
    before = (out / "samples.jsonl").read_bytes()
    assert call(*arguments).exit_code == 0
    assert (out / "samples.jsonl").read_bytes() == before


def test_failures_are_said_aloud(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tuple(
        Sample(s.id, " ".join([s.context] * n), s.questions) for s, n in zip(tiny_samples(2), (1, 30), strict=True)
    )
    monkeypatch.setattr(TinyTask, "samples", lambda *_: iter(long))
    result = call("--model", folder, "--method", "full", "--tasks", "tiny", "--device", "cpu", "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert "3 of 6 questions could not be answered" in result.stderr
    assert f"{tmp_path / 'samples.jsonl'} says why" in result.stderr
    said = "3 of 6 prompts of 'tiny' (aware) have more tokens (up to 994) than the model has positions (512)"
    assert said in result.stderr
    assert result.stderr.index(said) < result.stderr.index("could not be answered")
    monkeypatch.setattr(TinyTask, "samples", lambda *_: iter(long[1:]))
    monkeypatch.setattr("millpond_lab.evals.harness.run._examine", lambda *_: pytest.fail("a prompt was run"))
    none = call("--model", folder, "--tasks", "tiny", "--device", "cpu", "--out", str(tmp_path / "none"))
    assert none.exit_code == 2
    assert "3 of 3 prompts of 'tiny' (aware) have more tokens (up to 994)" in none.stderr
    assert "or name a model with more positions" in none.stderr


def test_the_bundled_model_answers_its_own_task(tmp_path: Path) -> None:
    result = call(
        "--method",
        "full,window",
        "--tasks",
        "recall:length=256:pairs=16:questions=4",
        "--protocol",
        "agnostic",
        "--budget",
        "20%",
        "--samples",
        "3",
        "--device",
        "cpu",
        "--out",
        str(tmp_path),
    )
    assert result.exit_code == 0, result.output + str(result.exception)
    rows = {row["method"]: row for row in json.loads((tmp_path / "summary.json").read_text())}
    assert rows["full"]["n"] == rows["window"]["n"] == 12
    assert rows["window"]["score"] < rows["full"]["score"]
    assert rows["window"]["kept_share"] == pytest.approx(0.2, abs=0.01)
    assert rows["window"]["kv_bytes"] < 0.4 * rows["full"]["kv_bytes"]


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["--tasks", "tinny"], "did you mean 'tiny'"),
        (["--tasks", "tiny", "--method", "h20"], "did you mean 'h2o'"),
        (["--tasks", "tiny", "--budget", "lots"], "is not a budget"),
        (["--tasks", "tiny", "--protocol", "blind"], "unknown protocol"),
        (["--tasks", "tiny", "--codec", ","], "--codec is empty"),
    ],
)
def test_mistakes_are_one_sentence_before_anything_is_loaded(
    arguments: list[str], match: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millpond.models.load.load_model", lambda *_: pytest.fail("a model was loaded"))
    result = call(*arguments, "--out", str(tmp_path))
    assert result.exit_code == 2
    assert match in result.stderr
    assert "Traceback" not in result.output


def test_a_file_of_ones_own_adds_a_method_and_one_that_changed_is_not_mixed(
    folder: str,
    plugin: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = dict(METHODS._entries)
    arguments = ["--model", folder, "--method", "window,of_ones_own", "--budget", "7", "--tasks", "tiny", "--samples"]
    arguments += ["2", "--plugin", str(plugin), "--out", str(tmp_path / "out")]
    for _ in range(2):
        result = call(*arguments)
        assert result.exit_code == 0, result.output + str(result.exception)
    window, own = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert own["method"] == "of_ones_own"
    assert own["score"] == window["score"]

    monkeypatch.setattr(METHODS, "_entries", known)  # another process, after a change
    monkeypatch.delitem(sys.modules, MODULE)
    plugin.write_text(PLUGIN + "# changed\n")
    result = call(*arguments)
    assert result.exit_code == 2
    said = "method 'of_ones_own' from before its file was changed; give the method another name"
    assert said in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("text", "message"),
    [(None, "must be a Python file that registers methods or tasks"), ("import nothing", "fails with ModuleNotFound")],
)
def test_a_file_that_adds_nothing_is_named(plugin: Path, text: str | None, message: str) -> None:  # noqa: F811
    plugin.unlink() if text is None else plugin.write_text(text)
    result = call("--tasks", "tiny", "--plugin", str(plugin))
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())
