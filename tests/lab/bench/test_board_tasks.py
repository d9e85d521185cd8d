"""The script of the board's tasks: forms that can be built, scores over contexts, and a run that goes on."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from millpond.errors import OptionError
from millpond_lab.evals.decoding.record import Record
from millpond_lab.evals.spec import Spec
from millpond_lab.evals.task import TASKS

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks" / "quality"))

import board_tasks
from board_tasks import FORMS, Form, Runner, families, page, scored, solved


def test_every_form_is_a_task_and_the_first_of_a_family_is_the_longest() -> None:
    for form in FORMS:
        assert Spec.parse(form.task).build(TASKS).kind == "generate"
        assert form.length in (1024, 2048, 4096)
        assert form.contexts(25) * form.questions >= 100
        assert form.contexts(25) >= 25
    for own in families(FORMS).values():
        assert own[0].length == max(form.length for form in own)
        assert len({(form.task, form.protocol) for form in own}) == len(own)


def record(sample: str, question: int, score: float) -> Record:
    return Record("cell", sample, question, "", score, 1.0, 100, 1.0, 8, 8)


def test_questions_of_a_context_are_one_draw_of_the_bootstrap() -> None:
    form = FORMS[0]
    apart = scored(form, [record(f"s{i}", 0, i % 2) for i in range(40)])
    together = scored(form, [record(f"s{i // 20}", i % 20, i // 20) for i in range(40)])
    assert apart["score"] == together["score"] == 0.5
    assert (apart["contexts"], together["contexts"]) == (40, 2)
    assert together["bootstrap"] == [0.0, 1.0]
    assert 0.3 < apart["bootstrap"][0] < 0.5 < apart["bootstrap"][1] < 0.7
    assert apart["solved"]
    assert not scored(form, [record("s", 0, 0.0), record("t", 0, 0.9)])["solved"]


class Told(Runner):
    """Gives the scores that it was made with, and writes down what it was asked."""

    def __init__(self, scores: dict[str, float]) -> None:
        self.scores, self.contexts, self.asked = scores, 2, list[str]()

    def row(self, form: Form) -> dict[str, Any]:
        self.asked.append(form.task)
        score = self.scores.get(form.task, 0.0)
        records = [record(f"s{i}", 0, score) for i in range(form.contexts(self.contexts))]
        return {**scored(form, records), "cpu_seconds": 1.0}


def test_a_family_ends_with_the_first_form_that_is_solved_and_what_is_known_is_not_run() -> None:
    forms = [Form("a", f"a{i}:questions=4") for i in range(3)] + [Form("b", "b0")]
    runner = Told({"a1:questions=4": 0.75})
    rows = list(runner.rows(forms, {}))
    assert runner.asked == ["a0:questions=4", "a1:questions=4", "b0"]
    assert [row["task"] for row in solved(rows)] == ["a1:questions=4"]
    known = {board_tasks._key(row): row for row in rows}
    again = Told({})
    assert list(again.rows(forms, known)) == rows
    assert again.asked == []
    again.contexts = 3  # more contexts than are known
    list(again.rows(forms, known))
    assert "a0:questions=4" in again.asked


def test_the_page_names_what_stands_for_a_family() -> None:
    rows = list(Told({"a1:questions=4": 1.0}).rows([Form("a", f"a{i}:questions=4") for i in range(3)], {}))
    text = page({"models": {"tiny": {"rows": rows}}})
    assert "Families that are solved: 1." in text
    assert text.count("| yes |") == 1
    assert "a2" not in text


@pytest.mark.parametrize("questions", [1, 4])
def test_fewer_questions_take_more_contexts(questions: int) -> None:
    form = Form("a", f"a:questions={questions}")
    assert form.contexts(25) == 100 // questions


def test_a_family_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given = ["--model", "pond-recall", "--families", "facts in prose;cod", "--rows", str(tmp_path / "rows.json")]
    monkeypatch.setattr(sys, "argv", ["board_tasks.py", *given])
    with pytest.raises(OptionError, match="unknown family 'cod'; did you mean 'code'"):
        board_tasks.main()
    assert not list(tmp_path.iterdir())
