"""Completion of code: definitions far above, files of a user's own, and files that are no source."""

from __future__ import annotations

import ast
import random
from pathlib import Path

import pytest

from millpond.errors import DataError
from millpond_lab.evals.data.python_source import MOST_BYTES, draw_definitions, functions, read_python
from tests.helpers.evals.task_help import build, draw, total, word_tokenizer


def test_a_line_goes_on_with_what_is_defined_above() -> None:
    task = build("code", length=900, definitions=8, questions=8)
    (sample,) = draw(task, word_tokenizer())
    assert len({question.text.split("\n")[3].split("(")[0][:4] for question in sample.questions}) >= 3
    for question in sample.questions:
        (wanted,) = question.references
        assert sample.context.count(wanted) >= 1
        assert wanted not in question.text
        assert task.score(question, f" {wanted})") == 1.0
        assert task.score(question, f" {wanted}s") == task.score(question, "") == 0.0


def test_what_is_made_here_is_python() -> None:
    rng = random.Random(3)
    stream = functions(rng)
    for text in (*(each.told for each in draw_definitions(rng, 8)), *(next(stream) for _ in range(20))):
        ast.parse(text)


def test_files_of_a_folder_fill_the_text(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "a.py").write_text("import os\n\n\n@first\ndef one():\n    return 1\n\n\ndef two():\n\n    return 2\n")
    (tmp_path / "deep" / "b.py").write_text("class Three:\n    pass\n")
    (tmp_path / "c.txt").write_text("no source")
    assert read_python(str(tmp_path)) == [
        "import os\n",
        "@first\ndef one():\n    return 1\n",
        "def two():\n\n    return 2\n",
        "class Three:\n    pass\n",
    ]
    (sample,) = draw(build("code", path=str(tmp_path), length=400), word_tokenizer())
    assert "def two():\n\n    return 2" in sample.context
    assert "no source" not in sample.context
    assert total(word_tokenizer(), sample) <= 400


def test_files_that_are_no_source_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no Python source"):
        read_python(str(tmp_path))
    with pytest.raises(DataError, match="cannot be read"):
        read_python(str(tmp_path / "nowhere.py"))
    (tmp_path / "long.py").write_text("x" * (MOST_BYTES + 1))
    with pytest.raises(DataError, match=r"long\.py has more than 1,000,000 bytes"):
        read_python(str(tmp_path))
    (tmp_path / "long.py").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match="cannot be read"):
        draw(build("code", path=str(tmp_path)), word_tokenizer())
