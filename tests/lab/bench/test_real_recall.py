"""The script that compares a real model's answers pairs questions with those of the full cache."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "quality" / "real_recall.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("real_recall", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def record(method: str, protocol: str, sample: int, question: int, score: float) -> str:
    cell = f"m|{method}|{'' if method == 'full' else '20%'}|auto|facts|{protocol}|7|millpond"
    held = 100 if method == "full" else 20
    return json.dumps(
        {
            "cell": cell,
            "sample": str(sample),
            "question": question,
            "score": score,
            "kv_bytes": held,
            "full_kv_bytes": 100,
            "failure": "",
        }
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Four contexts of two questions: full answers 7 of 8, h2o 4, in another order; window is not finished."""
    places = [(sample, question) for sample in range(4) for question in range(2)]
    lines = [record("full", "agnostic", *place, float(place != (3, 1))) for place in places]
    lines += [record("h2o", "agnostic", *place, float(place[1] == 0)) for place in reversed(places)]
    lines += [record("window", "agnostic", 0, 0, 1.0), record("h2o", "aware", 0, 0, 1.0)]
    (tmp_path / "samples.jsonl").write_text("\n".join(lines), encoding="utf-8")
    (tmp_path / "run.json").write_text(json.dumps({"tasks": {"facts": {"questions": 8}}}), encoding="utf-8")
    return tmp_path


def test_questions_are_paired_and_unfinished_cells_left_out(
    script: ModuleType, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    full, h2o = script.compared(*script.read(folder))
    said = capsys.readouterr().out
    assert "facts agnostic window 20% auto: 1 of 8 questions" in said
    assert "facts aware h2o 20% auto: 1 of 8 questions" in said
    assert (full["method"], full["score"]["mean"], full["of_full"], full["bytes"]) == ("full", 0.875, 1.0, 1.0)
    assert full["difference"]["mean"] == 0.0
    assert (h2o["contexts"], h2o["questions"], h2o["bytes"]) == (4, 8, 0.2)
    assert h2o["score"]["mean"] == 0.5
    assert h2o["of_full"] == pytest.approx(0.5 / 0.875)
    # by context full has 1, 1, 1, 1/2 and h2o 1/2 each
    assert h2o["difference"]["mean"] == pytest.approx(-0.375)
    # four contexts say little: not even that h2o is behind
    assert -1.0 <= h2o["difference"]["low"] < -0.375 < 0.0 < h2o["difference"]["high"]


def test_the_tables_name_their_questions(script: ModuleType, folder: Path) -> None:
    text = script.page(script.compared(*script.read(folder)))
    assert "## facts, agnostic\n\n8 questions on 4 contexts.\n" in text
    assert "| h2o | 20% | bf16 | 20.0% | 0.500 |" in text
    assert "| 0.57 |" in text
    assert "window" not in text


def test_the_first_contexts_alone_are_compared_where_that_is_asked_for(
    script: ModuleType, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (folder / "samples.jsonl").open("a", encoding="utf-8") as file:
        file.write("\n" + record("window", "agnostic", 0, 1, 0.0))
    rows = {row["method"]: row for row in script.compared(*script.read(folder), (0, 1))}
    assert rows.keys() == {"full", "h2o", "window"}
    assert {row["questions"] for row in rows.values()} == {2}
    assert [rows[name]["score"]["mean"] for name in ("full", "h2o", "window")] == [1.0, 0.5, 0.5]
    assert script.compared(*script.read(folder), (0, 5)) == []  # there are four
    assert "facts agnostic full  auto: 8 of 8 questions" in capsys.readouterr().out


def test_another_cell_can_be_the_reference(script: ModuleType, folder: Path) -> None:
    against = ("h2o", "20%")
    rows = script.compared(*script.read(folder), None, against)
    assert {row["method"]: row["difference"]["mean"] for row in rows} == {"full": 0.375, "h2o": 0.0}
    text = script.page(rows, against)
    assert "difference to h2o 20%, 95 %" in text
    assert text.count("to +") == 1  # the reference's own difference is left out
