"""RULER's published JSON Lines: how each task's prompt is cut, answered and scored, and which rows are refused."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from millpond.errors import DataError, OptionError
from millpond_lab.evals.data import data_files
from millpond_lab.evals.harness.plan import EvalPlan
from millpond_lab.evals.harness.run import run
from millpond_lab.evals.spec import parse_specs
from tests.helpers.evals.small import tiny_model
from tests.helpers.evals.task_help import build, draw, word_tokenizer, write_rows

HAY = "The river is wide. One of the special magic numbers for mill is: 8126934. What a day. " * 4
NIAH = (
    f"A special magic number is hidden in the text below. Remember it.\n{HAY}\nWhat is the special magic number "
    "for mill mentioned in the provided text?"
)
PREFIX = " The special magic number for mill mentioned in the provided text is"
QUESTION = "Question: Find all variables that are assigned the value 12345 in the text above."


def row(**more: Any) -> dict[str, Any]:
    return {"index": 0, "input": NIAH + PREFIX, "outputs": ["8126934"], "length": 4012, **more}


@pytest.mark.parametrize(
    ("task", "tokens", "score"),
    [
        ("niah_multikey_2", 128, 0.5),
        ("vt", 30, 0.5),
        ("variable_tracking", 30, 0.5),
        ("cwe", 120, 0.5),
        ("fwe", 50, 0.5),
        ("qa_1", 32, 1.0),
        ("qa_2", 32, 1.0),
    ],
)
def test_each_task_has_rulers_tokens_and_score(task: str, tokens: int, score: float, tmp_path: Path) -> None:
    example = f"VAR X1 = 5\n{QUESTION} Answer: X1\n\n"
    prompt = NIAH if task.startswith("niah") else f"Remember.\n{example}{HAY}\n{QUESTION}"
    path = write_rows(tmp_path / "validation.jsonl", [row(input=prompt, outputs=["Mill", "pond"], length=8192)])
    built = build("ruler", path=path, task=task)
    (sample,) = draw(built, word_tokenizer())
    (question,) = sample.questions
    assert sample.context + question.text == prompt
    assert question.text.startswith("\nWhat is" if task.startswith("niah") else f"\n{QUESTION}")
    assert question.max_new_tokens == tokens
    assert sample.facts == {"length": 8192, "task": task}
    assert built.score(question, " a windmill\x00") == score
    assert built.score(question, "nothing") == 0.0


def test_the_task_is_the_folders_or_the_files_name(tmp_path: Path) -> None:
    folder = tmp_path / "qa_1"
    folder.mkdir()
    rows = [row(input=f"Documents.\n{HAY}\n\nQuestion: Who? Answer:")]
    for file in (folder / "validation.jsonl", tmp_path / "qa_2.jsonl"):
        (sample,) = draw(build("ruler", path=write_rows(file, rows)), word_tokenizer())
        assert sample.facts["task"] in ("qa_1", "qa_2")
        assert sample.questions[0].max_new_tokens == 32
    with pytest.raises(OptionError, match=r"folder is named for a task; add task= with niah_"):
        build("ruler", path=write_rows(tmp_path / "validation.jsonl", rows))
    with pytest.raises(OptionError, match="task='nih_single' is none of RULER's"):
        build("ruler", path=str(tmp_path / "qa_2.jsonl"), task="nih_single")


def test_options_go_before_the_task(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "niah_single_1.jsonl", [row(outputs=["812", "5"], answer_prefix=" It is")])
    built = build("ruler", path=path, match="part", max_new_tokens=7, question="What a day")
    (question,) = draw(built, word_tokenizer())[0].questions
    assert (question.max_new_tokens, built.score(question, "8126934")) == (7, 1.0)
    assert question.text.startswith("What a day. \nWhat is the special")
    assert question.text.endswith(f"{PREFIX} It is")


def test_every_row_is_checked_before_one_is_drawn(tmp_path: Path) -> None:
    broken: list[tuple[dict[str, Any], str]] = [
        ({"index": "first"}, "field 'index' is 'first', not a whole number"),
        ({"index": -1}, "field 'index' is -1, and must be at least 0"),
        ({"length": 0}, "field 'length' is 0, and must be at least 1"),
        ({"length": True}, "field 'length' is of type bool"),
        ({"input": 5}, "field 'input' is of type int, and must be text"),
        ({"input": HAY}, r"field 'input' has no question that begins with '\\nWhat ' behind a text; add question=TEXT"),
        ({"input": "\nWhat is it?"}, "field 'input' has no question"),
        ({"outputs": "8126934"}, "field 'outputs' is of type str, and must be a list"),
        ({"outputs": []}, "field 'outputs' must be a list of at least one text"),
        ({"outputs": ["8", " "]}, "field 'outputs' must be 1 to 1,000 texts of 1 to 10,000 characters"),
        ({"outputs": ["8"] * 1001}, "field 'outputs' must be 1 to 1,000 texts"),
        ({"outputs": ["8" * 10_001]}, "field 'outputs' must be 1 to 1,000 texts"),
    ]
    for number, (change, message) in enumerate(broken):
        path = write_rows(tmp_path / f"niah_{number}.jsonl", [row(index=i) for i in range(8)] + [row(**change)])
        with pytest.raises(DataError, match=f"row 9: {message}"):
            draw(build("ruler", path=path), word_tokenizer())
    missing = row()
    del missing["outputs"]
    with pytest.raises(DataError, match=r"row 1: field 'outputs' is missing \(it has index, input, length\)"):
        draw(build("ruler", path=write_rows(tmp_path / "niah.jsonl", [missing])), word_tokenizer())
    with pytest.raises(DataError, match="none was named; add path=FILE"):
        draw(build("ruler"), word_tokenizer())


@pytest.mark.parametrize("line", ["[" * 100_000, '{"index": ' + "1" * 5000 + "}", '{"index": 0', "null"])
def test_lines_that_are_no_row_are_refused_with_their_number(line: str, tmp_path: Path) -> None:
    path = tmp_path / "niah_single_1.jsonl"
    path.write_text(json.dumps(row()) + "\n\n" + line + "\n")
    with pytest.raises(DataError, match=r"niah_single_1\.jsonl, row 3"):
        draw(build("ruler", path=str(path)), word_tokenizer())


def test_a_file_is_read_up_to_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_files, "MOST_BYTES", 1000)
    path = tmp_path / "niah.jsonl.gz"
    path.write_bytes(gzip.compress(b" " * 10_000_000))
    with pytest.raises(DataError, match="more than 1,000 bytes of text; cut it into several files"):
        draw(build("ruler", path=str(path)), word_tokenizer())
    path.write_bytes(gzip.compress(b" " * 100)[:-12])
    with pytest.raises(DataError, match="cannot be read"):
        draw(build("ruler", path=str(path)), word_tokenizer())
    with pytest.raises(DataError, match="is no regular file"):
        draw(build("ruler", path="/dev/zero", task="niah"), word_tokenizer())


def test_a_file_is_run_in_every_protocol(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "niah_single_1.jsonl", [row(index=i) for i in range(3)])
    tasks = parse_specs(f"ruler:path={path}:max_new_tokens=2", "tasks")
    plan = EvalPlan("m", parse_specs("full,h2o", "method"), tasks, ["30%"], protocols=["aware", "agnostic", "turns"])
    rows = run(plan, tiny_model(), small_words(), tmp_path / "out")
    assert [(each.n, each.failures) for each in rows] == [(3, 0)] * 6


def small_words() -> Any:
    """The words of the prompt as a tokenizer of the tiny model."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    words = sorted(set("".join(c if c.isalnum() else " " for c in NIAH + PREFIX).split()) | {".", ":", "?"})
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(["<unk>", *words])}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")
