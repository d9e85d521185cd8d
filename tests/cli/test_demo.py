"""The demo's exam: from the file that comes with the model, and drawn by the lab."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from millpond.cli.demo import task as demo_task
from millpond.cli.demo.task import DemoTask
from millpond.errors import OptionError
from millpond.install_command import install_command
from tests.cli.test_cli import right, wrong


@pytest.fixture
def no_lab(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, demo_task.EXAMS, None)


@pytest.mark.usefixtures("no_lab")
def test_the_text_of_the_model_needs_no_lab(tmp_path: Path) -> None:
    shown = right("demo", "--questions", "4", "--methods", "full", "--out", str(tmp_path)).output
    assert "4 of 4" in shown
    assert "It reads 2,049 tokens" in shown


@pytest.mark.usefixtures("no_lab")
@pytest.mark.parametrize("options", [("--seed", "1"), ("--length", "256"), ("--length", "256", "--seed", "3")])
def test_another_text_needs_the_lab(tmp_path: Path, options: tuple[str, ...]) -> None:
    said = wrong("demo", "--out", str(tmp_path), *options)
    assert "demo with another --length or --seed needs" in said
    assert "".join(install_command("lab").split()) in "".join(said.split())


def test_fewer_questions_are_the_first_of_all() -> None:
    whole, few = DemoTask.draw(2048, 32, 0), DemoTask.draw(2048, 5, 0)
    assert few.context.equal(whole.context)
    assert few.questions.equal(whole.questions[:5])
    assert few.answers.equal(whole.answers[:5])
    assert few.pairs == whole.pairs
    assert len(whole.pairs) == 2 * demo_task.PAIRS


@pytest.mark.parametrize("questions", [-1, 0, 33])
def test_there_are_as_many_questions_as_pairs(questions: int) -> None:
    with pytest.raises(OptionError, match=f"questions={questions}: the text answers 1 to 32"):
        DemoTask.draw(2048, questions, 0)


def test_the_beginning_is_a_task_of_its_own() -> None:
    task = DemoTask.draw(2048, 32, 0).beginning(100)
    assert task.length == 100
    assert task.prompts.shape == (1, 103)
    assert len(task.answers) == 1
