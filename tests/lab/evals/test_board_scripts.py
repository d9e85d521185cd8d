"""benchmarks/quality/board.py and default_choice.py: rows of a small model end to end, and the rule of the choice."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from millpond.errors import OptionError
from millpond_lab.evals.decoding.record import Cell, Record
from millpond_lab.evals.report.board import FULL, Setting, kept
from millpond_lab.evals.report.board_summary import summary, summary_table
from millpond_lab.evals.report.default_choice import choice_table, choose, judged, points
from millpond_lab.evals.report.plots.board import board_picture
from millpond_lab.evals.task import TASKS, task
from tests.helpers.evals.small import TinyTask, save_tiny, tiny_samples

QUALITY = Path(__file__).parents[3] / "benchmarks" / "quality"


@pytest.fixture
def board(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(QUALITY))
    return importlib.import_module("board")


def report(**models: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Rows of each model: {setting: {"bytes": share, family: scores}}."""
    return {
        "models": {
            name: {
                "rows": [
                    {"setting": setting.split(","), "family": family}
                    | {"bytes": own["bytes"], "scores": scores, "task": "t", "protocol": "agnostic"}
                    for setting, own in settings.items()
                    for family, scores in own.items()
                    if family != "bytes"
                ]
            }
            for name, settings in models.items()
        }
    }


def test_a_row_holds_the_mean_of_each_context_and_bytes_of_bf16(
    tmp_path: Path, board: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    TASKS.names()

    @task("tiny_texts")
    def tiny_texts() -> TinyTask:
        """Answers by decoding."""
        return TinyTask(items=tiny_samples(3))

    monkeypatch.setitem(board.GROUPS, "small", (Setting("h2o", "9"),))
    model = save_tiny(tmp_path / "model")
    form = {"family": "texts", "task": "tiny_texts", "protocol": "agnostic", "solved": True}
    tasks, rows = tmp_path / "tasks.json", tmp_path / "rows.json"
    tasks.write_text(json.dumps({"models": {"tiny": {"rows": [form]}}}))
    given = ["--model", model, "--name", "tiny", "--dtype", "f32", "--tasks", str(tasks), "--settings", "small"]
    more = ["--setting", "tova 9", "--contexts", "1", "--out", str(tmp_path / "out"), "--rows", str(rows)]
    monkeypatch.setattr(sys, "argv", ["board.py", *given, *more])
    try:
        board.main()
        before = rows.read_text()
        board.main()
    finally:
        del TASKS._entries["tiny_texts"]
    assert rows.read_text() == before
    own = json.loads(before)["models"]["tiny"]
    assert [row["setting"] for row in own["rows"]] == [
        ["full", "", "auto"],
        ["h2o", "9", "auto"],
        ["tova", "9", "auto"],
    ]
    full, h2o, _ = own["rows"]
    assert len(full["scores"]) == 3
    assert full["questions"] == 9
    assert full["bytes"] >= 1
    assert h2o["bytes"] < full["bytes"]
    assert "| `h2o 9` |" in rows.with_suffix(".md").read_text()


@pytest.mark.parametrize(
    "setting",
    [
        Setting("full"),
        Setting("full", codec="int8+int4"),
        Setting("h2o:recent=0.1", "512"),
        Setting("kvzip", "60%", "rotated4"),
        Setting("ada", "20%, at least 512"),
        Setting("ada", "20%, at least 512", "bf16:20%;int8:20%;int4"),
    ],
)
def test_a_setting_is_read_as_it_is_written(setting: Setting) -> None:
    assert Setting.parse(str(setting)) == setting


@pytest.mark.parametrize("text", ["h2o 32% rotated5", "h2o many", "h2o many int8"])
def test_what_is_no_setting_is_refused(text: str) -> None:
    with pytest.raises(OptionError):
        Setting.parse(text)


def test_fewer_contexts_replace_no_row_of_more(tmp_path: Path, board: ModuleType) -> None:
    note = {"dtype": "f32", "seed": 7, "machine": {"cpu": "one"}}
    row = {"setting": ["full", "", "auto"], "family": "facts", "task": "t", "protocol": "agnostic", "questions": 8}
    for scores in ([1.0, 0.5], [0.0], [0.5, 0.5]):
        board.add_rows(tmp_path / "rows.json", "m", [{**row, "bytes": 1.0, "scores": scores}], note)
        last = json.loads((tmp_path / "rows.json").read_text())["models"]["m"]["rows"]
        assert last[0]["scores"] == ([1.0, 0.5] if len(scores) < 2 else scores)


def test_rows_of_another_processor_name_it(tmp_path: Path, board: ModuleType) -> None:
    rows, row = tmp_path / "rows.json", {"task": "t", "protocol": "agnostic", "questions": 8, "bytes": 1.0}
    for cpu, method in (("one", "full"), ("other", "h2o"), ("one", "tova")):
        fresh = row | {"setting": [method, "", "auto"], "family": "facts", "scores": [1.0, 0.5]}
        board.add_rows(rows, "m", [fresh], {"dtype": "f32", "seed": 7, "machine": {"cpu": cpu}})
    own = json.loads(rows.read_text())["models"]["m"]
    assert (own["machine"]["cpu"], [each.get("cpu") for each in own["rows"]]) == ("one", [None, "other", None])
    assert "Computed in f32 on one; `h2o` on facts on other; seed 7." in rows.with_suffix(".md").read_text()


def test_contexts_of_an_interrupted_run_are_the_first_of_a_whole_one(board: ModuleType) -> None:
    cell = Cell("m", "full", "", "auto", "t", "agnostic", 7)
    records = [Record(cell.key, f"7-{i}", 0, "", i / 20, 1, 9, 1.0, 100, 100, bf16_kv_bytes=100) for i in range(12)]
    whole, first = (board.row_of(cell, "facts", part, 2)["scores"] for part in (records, records[:4]))
    assert whole[:4] == first == [0.0, 0.05, 0.1, 0.15]
    assert whole[10] == 0.5


def test_what_is_kept_is_a_ratio_of_sums_over_the_same_contexts() -> None:
    generator = np.random.default_rng(1)
    full = generator.integers(0, 5, 40) / 4
    own = np.minimum(full, generator.integers(0, 5, 40) / 4)
    mean, low, high = kept(own, full)
    assert mean == pytest.approx(own.sum() / full.sum())
    assert low < mean < high
    assert kept(full, full) == (1, 1, 1)


def test_the_summary_has_the_mean_and_the_worst_of_the_tasks_that_are_solved() -> None:
    full, half = [1.0] * 8, [1.0, 0.0] * 4
    rows = report(
        one={
            "full": {"bytes": 1, "facts": full, "code": full, "copy": [0.25] * 8},
            "full,,int4": {"bytes": 0.3, "facts": full, "code": half, "copy": [0.0] * 8},
            "full,,rotated4": {"bytes": 0.31, "facts": full, "code": full[:4], "copy": full},
        },
        two={
            "full": {"bytes": 1, "facts": full},
            "full,,int4": {"bytes": 0.3, "facts": full},
            "full,,rotated4": {"bytes": 0.31, "facts": full[:7]},
        },
    )
    lines = summary_table(summary(rows, ["one", "two"]), {"one": "First", "two": "Second"}).splitlines()
    assert lines[0] == "| setting | bytes | First, 2 tasks | Second, 1 task |"
    assert [line.split("`")[1] for line in lines[2:]] == ["full", "full int4"], "rotated4 lacks contexts of the second"
    assert "| score 1.00 | score 1.00 |" in lines[2]
    assert "| 0.75; code 0.50 (" in lines[3]
    assert lines[3].endswith("| 1.00; facts 1.00 (1.00 to 1.00) |")
    fewer = report(one={"full": {"bytes": 1, "a": full, "b": full}, "full,,int4": {"bytes": 0.3, "a": full}})
    assert (
        summary_table(summary(fewer, ["one"]), {"one": "First"}).splitlines()[3].endswith("| a 1.00 (1.00 to 1.00) |")
    )


def test_the_summary_names_the_contexts_of_settings_that_may_have_fewer() -> None:
    full, half, few = [1.0] * 8, [1.0, 0.0] * 4, Setting("h2o", "20%")
    rows = report(
        one={
            "full": {"bytes": 1, "facts": half, "code": full, "copy": full},
            "h2o,20%,auto": {"bytes": 0.2, "facts": half[:2], "code": [0.0, 1.0, 0.0, 0.0]},
        },
        two={"full": {"bytes": 1, "facts": full}},
    )
    models, names = ["one", "two"], {"one": "First", "two": "Second"}
    assert [line.setting for line in summary(rows, models).lines] == [FULL]
    found = summary(rows, models, [few])
    last = summary_table(found, names).splitlines()[-1]
    assert last.startswith("| `h2o 20%` | 20% | 0.62; code 0.25 (0.00 to ")
    assert last.endswith(", 4 contexts), of 2 tasks |  |"), "as many of the full cache's, none of the second"
    board_picture(found, names, {})


def test_the_fewest_bytes_that_keep_enough_on_every_task_are_chosen() -> None:
    full = [1.0] * 40
    even_lost = [0.5, 1.0] * 20  # as it is chosen
    odd_lost = [1.0, 0.5] * 20
    rows = report(
        one={
            "full,,auto": {"bytes": 1.0, "facts": full, "code": full, "too hard": [0.25] * 40},
            "full,,int8": {"bytes": 0.54, "facts": full, "code": full},
            "full,,int4": {"bytes": 0.30, "facts": full, "code": odd_lost},
            "full,,rotated4": {"bytes": 0.29, "facts": full, "code": even_lost},
            "snapkv,20%,auto": {"bytes": 0.2, "facts": full},
        },
        two={
            "full,,auto": {"bytes": 1.0, "facts": full},
            "full,,int8": {"bytes": 0.54, "facts": full},
            "full,,int4": {"bytes": 0.30, "facts": full},
            "full,,rotated4": {"bytes": 0.29, "facts": full},
        },
    )
    found = choose(rows)
    assert found["default"] == Setting("full", "", "int4")
    assert found["held"] is False, "it loses half of the code on the contexts that judge"
    assert found["presets"] == {"light": Setting("full", "", "int4"), "balanced": None, "tiny": None}
    assert found["without rows of every task"] == ["snapkv 20%"]
    worst = {Setting(*row["setting"]): row["even"]["task"] for row in found["settings"]}
    assert worst[Setting("full", "", "rotated4")] == ("one", "code")
    assert "**default** light |" in choice_table(found)
    assert choose(rows, ["two"])["default"] == Setting("full", "", "rotated4")


def test_stored_forms_are_chosen_among_themselves_and_claimed_formats_not_at_all() -> None:
    full, lost = [1.0] * 8, [0.5] * 8
    rows = report(
        one={
            "full,,auto": {"bytes": 1.0, "facts": full, "turns": full},
            "full,,int8": {"bytes": 0.54, "facts": full, "turns": full},
            "turboquant:bits=2,,auto": {"bytes": 0.13, "facts": full, "turns": full},
            "stored:bits=1.5,,auto": {"bytes": 0.12, "facts": full},
            "stored:bits=1,,auto": {"bytes": 0.09, "facts": full},
            "stored:bits=0.5,,auto": {"bytes": 0.06, "facts": lost},
        }
    )
    found = choose(rows)
    assert found["default"] == Setting("full", "", "int8")
    assert found["without rows of every task"] == []
    stored = found["stored"]
    assert stored["default"] == Setting("stored:bits=1")
    assert stored["held"] is True
    assert [one["family"] for one in stored["tasks"]] == ["facts"]
    assert choice_table(found).count("**default**") == 2
    only = report(one={"full,,auto": {"bytes": 1.0, "facts": full}, "full,,int8": {"bytes": 0.54, "facts": full}})
    assert choose(only)["stored"]["default"] is None
    assert choice_table(choose(only)).count("Tasks: ") == 1


def test_tasks_that_the_full_cache_does_not_solve_count_for_nothing() -> None:
    rows = report(one={"full": {"bytes": 1, "facts": [1.0] * 4}, "full,,int8": {"bytes": 0.5, "facts": [1.0] * 4}})
    more = report(one={"full": {"bytes": 1.1, "code": [0.25] * 4}, "full,,int8": {"bytes": 0.9, "code": [0.0] * 4}})
    rows["models"]["one"]["rows"] += more["models"]["one"]["rows"]
    found = choose(rows)
    assert found["default"] == Setting("full", "", "int8")
    assert [(one["bytes"], one["even"]["mean"]) for one in found["settings"]] == [(0.5, 1.0)]


def test_rows_of_a_peer_are_named_with_it_and_chosen_by_nobody(board: ModuleType, tmp_path: Path) -> None:
    peer = importlib.import_module("board_peer")
    cells = [
        Cell("m", method, budget, "auto", "t", "agnostic", 7, "kvpress 0.5")
        for method, budget in (("full", ""), ("SnapKVPress", "20%"), ("KVzipPress", "20%"))
    ]
    ours = Cell("m", "snapkv", "20%", "auto", "t", "agnostic", 7, "millpond")
    held = {cells[0].key: 100, cells[1].key: 20, cells[2].key: 130, ours.key: 20}
    with (tmp_path / "samples.jsonl").open("w") as file:
        for cell in (*cells[:2], ours, cells[2]):
            for sample in ("7-0", "7-1"):
                record = Record(cell.key, sample, 0, "", 0.5, 1.0, 9, 0.2, held[cell.key], 100)
                file.write(json.dumps(asdict(record)) + "\n")
    rows = peer.peer_rows(cells, "facts", tmp_path)
    assert [(row["setting"], row["bytes"]) for row in rows] == [
        (["kvpress/full", "", "auto"], 1.0),
        (["kvpress/SnapKVPress", "20%", "auto"], 0.2),
        (["kvpress/KVzipPress", "20%", "auto"], 1.3),
    ]
    own = report(one={"full": {"bytes": 1, "facts": [1.0] * 4}, "full,,int8": {"bytes": 0.5, "facts": [1.0] * 4}})
    own["models"]["one"]["rows"] += [row | {"scores": [1.0] * 4} for row in rows]
    found = choose(own)
    assert found["default"] == Setting("full", "", "int8")
    assert found["presets"] == {"light": Setting("full", "", "int8"), "balanced": None, "tiny": None}


def test_presets_are_points_of_fewer_and_fewer_bytes_by_the_mean_over_tasks() -> None:
    full, lost = [1.0] * 8, [0.9, 0.9, *[1.0] * 6]
    rows = report(
        one={
            "full,,auto": {"bytes": 1.0, "facts": full, "code": full},
            "full,,int8": {"bytes": 0.5, "facts": full, "code": full},
            "full,,rotated4": {"bytes": 0.3, "facts": full, "code": [0.92, 1.0] * 4},
            "full,,rotated3": {"bytes": 0.2, "facts": lost, "code": [0.85, 1.0] * 4},
            "full,,rotated2": {"bytes": 0.1, "facts": [0.5] * 8, "code": full},
        }
    )
    found = choose(rows)
    assert {name: str(setting) for name, setting in found["presets"].items()} == {
        "light": "full int8",
        "balanced": "full rotated4",
        "tiny": "full rotated3",
    }
    assert found["default"] == Setting("full", "", "int8")
    assert points({}, {}) == {"light": None, "balanced": None, "tiny": None}


def test_unknown_models_and_families_are_refused(board: ModuleType, tmp_path: Path) -> None:
    form = {"family": "facts", "task": "t", "protocol": "agnostic", "solved": True}
    tasks = tmp_path / "tasks.json"
    tasks.write_text(json.dumps({"models": {"m": {"rows": [form, {**form, "family": "code", "solved": False}]}}}))
    assert board.tasks_of(tasks, "m", None) == board.tasks_of(tasks, "m", ["facts"]) == [form]
    with pytest.raises(OptionError, match="solved family 'code'"):
        board.tasks_of(tasks, "m", ["code"])
    with pytest.raises(OptionError, match="model 'other'"):
        board.tasks_of(tasks, "other", None)


def test_a_low_end_counts_for_the_default() -> None:
    full, uneven = [1.0] * 8, [0.9, 1.0, *[1.0] * 6]
    rows = report(one={"full,,auto": {"bytes": 1.0, "facts": full}, "full,,int4": {"bytes": 0.3, "facts": uneven}})
    found = choose(rows)
    assert judged(uneven_task := {("one", "facts"): uneven}, {("one", "facts"): full}, 0).mean == 0.975
    assert judged(uneven_task, {("one", "facts"): full}, 0).low < 0.93
    assert found["default"] is None
    assert found["presets"]["balanced"] == Setting("full", "", "int4")


PROGRAM = """#!/bin/sh
printf "%s|" "$@" >> "$LOG"
echo >> "$LOG"
"""


def calls(folder: Path, *parts: str) -> list[list[str]]:
    """What board.sh runs: the arguments of each call of Python."""
    (folder / "python").write_text(PROGRAM, encoding="utf-8")
    (folder / "python").chmod(0o755)
    known = {"PATH": os.environ["PATH"], "BIN": str(folder), "LOG": str(folder / "log"), "OUT": str(folder / "out")}
    known |= {"MODELS": "one=a two=b/c", "ROWS": str(folder), "DTYPE": "f32"}
    subprocess.run(["sh", str(QUALITY / "board.sh"), *parts], env=known, check=True)
    lines = (folder / "log").read_text(encoding="utf-8").splitlines()
    return [line.strip("|").split("|")[2:] if line.startswith("-W") else line.strip("|").split("|") for line in lines]


def test_the_script_runs_each_model_and_then_the_choice(tmp_path: Path) -> None:
    found = calls(tmp_path, "default")
    assert [call[0].rsplit("/")[-1] for call in found] == ["board.py", "board.py", "default_choice.py"]
    assert [call[1:7] for call in found[:2]] == [
        ["--name", "one", "--model", "a", "--dtype", "f32"],
        ["--name", "two", "--model", "b/c", "--dtype", "f32"],
    ]
    assert found[0][found[0].index("--settings") + 1] == "default"
    assert found[0][found[0].index("--tasks") + 1] == str(tmp_path / "board-tasks.json")
    assert found[2][1:] == ["--rows", f"{tmp_path}/board.json", "--out", f"{tmp_path}/default-choice.json"]


def test_the_quick_form_takes_short_texts_and_writes_beside_its_answers(tmp_path: Path) -> None:
    found = calls(tmp_path)
    assert len(found) == 5
    for call in found[:2]:
        assert call[call.index("--longest") + 1] == "1024"
    assert all(str(tmp_path / "out" / "quick") in " ".join(call) for call in found)


def test_an_unknown_part_is_refused(tmp_path: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError) as failed:
        calls(tmp_path, "everything")
    assert failed.value.returncode == 2
