"""`millpond eval --format kvpress`: folders, names and files of kvpress's evaluation, read back."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from millpond.cli.app import app
from millpond.errors import OptionError
from millpond.hf.layer_budgets import BudgetFloorWarning
from millpond_lab.evals.harness.plan import EvalPlan
from millpond_lab.evals.harness.run import run
from millpond_lab.evals.report.kvpress_folders import COLUMNS, KvpressFolders, check
from millpond_lab.evals.spec import parse_specs
from tests.helpers.evals.small import save_tiny, tiny_model
from tests.helpers.evals.task_help import write_rows
from tests.lab.evals.test_ruler_files import row, small_words

#: The settings that kvpress 0.5.4 writes of a run under a compression ratio, in its order.
KEYS = ["dataset", "data_dir", "model", "device", "press_name", "compression_ratio", "key_channel_compression_ratio"]
KEYS += ["fraction", "max_new_tokens", "max_context_length", "query_aware", "needle_depth", "compression_interval"]
KEYS += ["target_size", "hidden_states_buffer_size", "output_dir", "log_level", "model_kwargs", "press_init_command"]
KEYS += ["seed", "fp8"]


@pytest.fixture
def tasks(tmp_path: Path) -> list[str]:
    """RULER's files as its scripts leave them; the model answers with words of the text, so not all scores are 0."""
    found = []
    for name, outputs in (("niah_single_1", ["a", "e", "i", "o", "zz"]), ("qa_1", ["is", "mill"])):
        folder = tmp_path / "4096" / name
        folder.mkdir(parents=True)
        ends = {"input": row()["input"].replace("\nWhat is", "\nQuestion: What is")} if name == "qa_1" else {}
        path = write_rows(folder / "validation.jsonl", [row(index=i, outputs=outputs, **ends) for i in range(3)])
        found.append(f"ruler:path={path}:max_new_tokens=3")
    return found


def go(out: Path, tasks: list[str], **changes: Any) -> list[Any]:
    changes = {"methods": "full,window", "budgets": ["25%"], "protocols": ["agnostic"], **changes}
    methods = parse_specs(changes.pop("methods"), "method")
    specs = parse_specs(",".join(tasks), "tasks")
    settings = {"samples": 3, "batch_size": 2, **changes}
    progress = settings.pop("progress", lambda *_: None)
    plan = EvalPlan("org/tiny", methods, specs, dtype="auto", **settings)
    check(plan)
    writer = KvpressFolders(out / "kvpress", plan.dtype, "cpu")
    return run(plan, tiny_model(), small_words(), out, progress=progress, writer=writer)


def files(out: Path) -> dict[str, bytes]:
    return {str(p.relative_to(out)): p.read_bytes() for p in sorted((out / "kvpress").rglob("*")) if p.is_file()}


def test_a_folder_holds_all_tasks_of_a_setting(tmp_path: Path, tasks: list[str]) -> None:
    out = tmp_path / "out"
    rows = go(out, tasks, protocols=["aware", "agnostic"])
    assert sorted(p.name for p in (out / "kvpress").iterdir()) == [
        f"ruler__4096__org--tiny__{rest}{aware}"
        for rest in ("millpond_window__0.75", "no_press__0.00")
        for aware in ("", "__query_aware")
    ]
    for name, method in (("no_press__0.00", "full"), ("millpond_window__0.75__query_aware", "window")):
        place = out / "kvpress" / f"ruler__4096__org--tiny__{name}"
        aware = name.endswith("query_aware")
        own = [r for r in rows if r.method == method and r.protocol == ("aware" if aware else "agnostic")]
        metrics = json.loads((place / "metrics.json").read_text())
        wanted = [{"string_match": round(100 * r.score, 2)} for r in own]
        assert metrics == dict(zip(("niah_single_1", "qa_1"), wanted, strict=True))
        config = yaml.safe_load((place / "config.yaml").read_text())
        assert list(config) == KEYS
        assert (config["dataset"], config["data_dir"], config["model"]) == ("ruler", "4096", "org/tiny")
        assert config["compression_ratio"] == (0.75 if aware else 0.0)
        assert (config["query_aware"], config["fraction"], config["seed"]) == (aware, 1.0, 0)
        assert f"method={method} " in config["press_init_command"]
        with (place / "predictions.csv").open(newline="") as file:
            read = list(csv.DictReader(file))
        assert tuple(read[0]) == COLUMNS
        assert [r["task"] for r in read] == ["niah_single_1"] * 3 + ["qa_1"] * 3
        cells = {f"|{method}|", f"|{own[0].protocol}|"}
        records = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
        records = [r for r in records if all(part in r["cell"] for part in cells)]
        assert [r["predicted_answer"] for r in read] == [r["answer"] for r in records]
        assert json.loads(read[-1]["answer"]) == ["is", "mill"]
        assert [float(r["compression_ratio"]) for r in read] == [round(1 - r["kept_share"], 6) for r in records]
        assert read[0]["question"].startswith("\nWhat is the special magic number")
        assert read[0]["max_new_tokens"] == "3"
    assert any(r.score for r in rows)


def test_an_interrupted_run_gives_the_folders_of_a_whole_one(tmp_path: Path, tasks: list[str]) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    go(whole, tasks)

    def pull_the_plug(cell: Any, done: int, total: int) -> None:
        if cell.task == tasks[-1] and cell.method == "window" and done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        go(parts, tasks, progress=pull_the_plug)
    assert not (parts / "kvpress").exists(), "settings are examined together, so none has all tasks yet"
    go(parts, tasks)
    moved = {name: data.replace(b"/parts/", b"/whole/") for name, data in files(parts).items()}
    assert moved == files(whole)


def test_folders_are_made_of_a_run_that_is_finished_and_take_in_later_tasks(
    tmp_path: Path, tasks: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    go(out, tasks[:1])
    before = files(out)
    assert json.loads(before["kvpress/ruler__4096__org--tiny__no_press__0.00/metrics.json"]).keys() == {"niah_single_1"}
    go(out, tasks[1:])
    after = files(out)
    assert before.keys() == after.keys()
    both = json.loads(after["kvpress/ruler__4096__org--tiny__no_press__0.00/metrics.json"])
    assert both.keys() == {"niah_single_1", "qa_1"}
    for path in (out / "kvpress").rglob("*.*"):
        if path.is_file():
            path.unlink()
    monkeypatch.setattr("millpond_lab.evals.harness.run.Evaluator.examine", lambda *_: pytest.fail("examined again"))
    go(out, tasks)
    assert files(out) == after


def test_what_has_one_name_is_numbered_and_a_part_of_the_files_is_named(tmp_path: Path, tasks: list[str]) -> None:
    out = tmp_path / "out"
    go(out, tasks[:1], methods="window", budgets=["25%", "25.3%"], samples=2)
    place = out / "kvpress" / "ruler__4096__org--tiny__millpond_window__0.75__fraction0.667"
    configs = [yaml.safe_load((p / "config.yaml").read_text()) for p in (place, place / "1")]
    assert [config["compression_ratio"] for config in configs] == [0.75, 0.747]
    assert [config["fraction"] for config in configs] == [0.666667, 0.666667]


def test_a_ratio_that_was_not_reached_is_not_claimed(tmp_path: Path, tasks: list[str]) -> None:
    out = tmp_path / "out"
    with pytest.warns(BudgetFloorWarning):
        (row,) = go(out, tasks[:1], methods="window:sinks=60", budgets=["25%"])
    (place,) = (out / "kvpress").iterdir()
    ratio = yaml.safe_load((place / "config.yaml").read_text())["compression_ratio"]
    assert ratio == pytest.approx(1 - row.kept_share, abs=1e-6)
    assert 0.3 < ratio < 0.6
    assert place.name.endswith(f"__{ratio:.2f}")


def test_what_kvpress_cannot_say_is_refused_before_a_model_is_loaded(tmp_path: Path, tasks: list[str]) -> None:
    def of(tasks: str, protocol: str) -> EvalPlan:
        return EvalPlan("m", parse_specs("full", "method"), parse_specs(tasks, "tasks"), protocols=[protocol])

    with pytest.raises(OptionError, match="no protocol 'turns'; name aware or agnostic"):
        check(of(tasks[0], "turns"))
    with pytest.raises(OptionError, match="task 'text' is scored by perplexity"):
        check(of("text", "aware"))


def test_the_command_writes_them_and_knows_no_other_format(tmp_path: Path) -> None:
    folder, out = save_tiny(tmp_path / "tiny"), tmp_path / "out"
    arguments = ["eval", "--model", folder, "--tasks", "recall:length=150:pairs=2", "--method", "full,window"]
    arguments += ["--samples", "1", "--device", "cpu", "--out", str(out), "--format"]
    refused = CliRunner().invoke(app, [*arguments, "kvpres"], env={"COLUMNS": "160"})
    assert refused.exit_code == 2
    assert "unknown format 'kvpres'; did you mean 'kvpress'?" in refused.stderr
    assert not out.exists()
    result = CliRunner().invoke(app, [*arguments, "kvpress"])
    assert result.exit_code == 0, result.output + str(result.exception)
    names = {path.name.rpartition("tiny__")[2]: path for path in (out / "kvpress").iterdir()}
    assert names.keys() == {"no_press__0.00__query_aware", "millpond_window__0.80__query_aware"}
    config = yaml.safe_load((names["no_press__0.00__query_aware"] / "config.yaml").read_text())
    assert (config["dataset"], config["data_dir"], config["fraction"]) == ("millpond", None, 1.0)
