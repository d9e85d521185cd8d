"""`millpond remember` reads a text once; `millpond ask` answers from the file."""

from __future__ import annotations

from pathlib import Path

import pytest

from millpond.cli.recall import Task
from millpond.models.load import load_tokenizer
from tests.cli.test_cli import right, wrong


@pytest.fixture(scope="module")
def task() -> Task:
    return Task.draw(400, 3, seed=5)


def words(ids: list[int]) -> str:
    text = load_tokenizer("pond-recall").decode(ids)
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize("codec", ["auto", "int8"])
def test_one_text_and_many_questions(task: Task, codec: str, tmp_path: Path) -> None:
    text, file = tmp_path / "text.txt", str(tmp_path / "text.kv")
    text.write_text(words(task.context[0, 1:].tolist()), encoding="utf-8")  # the tokenizer begins texts itself
    done = right("remember", file, "--prompt-file", str(text), "--budget", "40%", "--codec", codec)
    assert f"{task.length} tokens read" in done.stderr
    questions = [words(question.tolist()) for question in task.questions]
    asked = right("ask", file, *questions, "--max-new-tokens", "4").stdout.splitlines()
    assert asked[0::2] == questions
    for answer, thing in zip(asked[1::2], task.answers.tolist(), strict=True):
        assert words([thing]) in answer.split()


def test_errors(tmp_path: Path) -> None:
    assert "cannot be read" in wrong("ask", str(tmp_path / "none.kv"), "what?")
    (tmp_path / "other").write_text("no tensors")
    assert "cannot be read" in wrong("ask", str(tmp_path / "other"), "what?")
    assert "keys to new positions" in wrong(
        "remember", str(tmp_path / "x.kv"), "--prompt", "go on " * 50, "--method", "streaming"
    )
