"""The script that writes texts to train heads on: books and facts of the evaluation are left out."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest

from millpond_lab.pond.english_facts import FORMS
from millpond_lab.train.text.data import HELD_OUT
from tests.helpers.evals.task_help import build, draw, word_tokenizer

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "quality" / "retain_real_texts.py"
#: Of a fact: whom or what it is about.
ABOUT = r"(?:code|number|word|gift) (?:of|for) (.+?) is|(\S+ \S+) (?:lives at|has hidden)"


@pytest.fixture
def books(tmp_path: Path) -> Path:
    """One book for training, and those of the evaluations, each with a word of its own."""
    for number, name in enumerate(("emma.txt", "bleak_house.txt", *HELD_OUT)):
        (tmp_path / name).write_text(f"It rained in book{number}. Nobody came!\nWas it late? " * 800, encoding="utf-8")
    return tmp_path


def written(books: Path, facts: str, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    """The rows that the script writes."""
    spec = importlib.util.spec_from_file_location("retain_real_texts", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    out = books / "texts.jsonl"
    arguments = ["--books", str(books), "--texts", "24", "--facts", facts, "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["retain_real_texts.py", *arguments])
    script.main()
    return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize(("facts", "left_out"), [("prose", {1, 2}), ("pond", {2, 3, 4, 5, 6})])
def test_books_of_the_evaluation_are_left_out(
    facts: str, left_out: set[int], books: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = written(books, facts, monkeypatch)
    found = {int(book) for row in rows for book in re.findall(r"book(\d)", " ".join(row.values()))}
    assert found == set(range(7)) - left_out
    assert sum("text" in row for row in rows) == len(rows) // 2
    for row in rows[::2]:
        assert row["answer"].rstrip(".").split()[-1] in row["context"]


def test_facts_of_training_are_not_those_that_are_asked_for(books: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    learned = {name for row in written(books, "pond", monkeypatch)[::2] for name in subjects(row["context"])}
    samples = draw(build("pond_facts", facts=20, questions=20, length=1500), word_tokenizer(), 2 * FORMS)
    asked = {name for sample in samples for name in subjects(sample.context)}
    assert min(len(learned), len(asked)) > 40
    assert not {name.split()[-1] for name in learned} & {name.split()[-1] for name in asked}


def subjects(text: str) -> set[str]:
    """People and things that facts in a text are about."""
    return {one or other for one, other in re.findall(ABOUT, text)}
