"""Rows with answers: an engine that is kept full, failed rows, and files that a second run goes on from. No Ray."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import millpond as mp
from millpond.cluster.data import (
    ROWS,
    AnswerFiles,
    AnswerRows,
    RowColumns,
    RowEngine,
    generate_dataset,
    in_order,
    key_of,
    prompt_of,
    rows_of,
)
from millpond.engine.config import EngineConfig
from millpond.errors import DataError, OptionError

COLUMNS = RowColumns("text", "id")
PARAMS = mp.SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
TEXTS = [f"{name} kettle quiet rain <ask> {name} <is>" for name in ("anna", "bob", "clara", "dora", "emil")]
CONFIG = EngineConfig(method="h2o", budget=64)


@pytest.fixture(scope="module")
def llm() -> Iterator[mp.LLM]:
    with mp.LLM("pond-recall", CONFIG) as made:
        yield made


@pytest.fixture(scope="module")
def expected(llm: mp.LLM) -> list[str]:
    return [output.completions[0].text for output in llm.generate(TEXTS, PARAMS)]


def rows() -> list[dict[str, Any]]:
    return [{"id": place, "text": text} for place, text in enumerate(TEXTS)]


def test_the_next_row_is_read_when_one_is_finished(llm: mp.LLM, expected: list[str]) -> None:
    """Two at a time: the third is read while the second still runs, and never three are in flight."""
    engine, read, most = llm.engine, [], 0
    prompts = [TEXTS[0], TEXTS[1] + " quiet rain" * 400, *TEXTS[2:]]

    def coming() -> Iterator[dict[str, Any]]:
        for place, text in enumerate(prompts):
            read.append(place)
            yield {"id": place, "text": text}

    order = []
    for place, row in RowEngine(engine, PARAMS, COLUMNS, 2).run(coming()):
        most = max(most, len(engine._requests))
        order.append(place)
        if place != 1:
            assert row["answer"] == expected[place]
        if len(order) == 1:
            assert (place, read) == (0, [0, 1]), "no more than two"
        if place == 1:
            assert 2 in read, "the third was taken in while the second ran"
    assert sorted(order) == list(range(5))
    assert most <= 2
    assert not engine.busy


def test_rows_that_cannot_be_answered_come_with_an_error(llm: mp.LLM, expected: list[str]) -> None:
    wrong = [{"id": 9, "text": ()}, {"id": 10}, {"id": 11, "text": 5.0}, {"id": 12, "text": (10**9,)}]
    found = dict(RowEngine(llm.engine, PARAMS, COLUMNS, 8).run([*wrong, *rows()]))
    assert [found[place]["answer"] for place in range(9)] == [None] * 4 + expected
    assert all(found[place]["error"] is None for place in range(4, 9))
    assert found[0]["error"].startswith("OptionError: the prompt is empty")
    assert "column 'text' is missing" in found[1]["error"]
    assert "is a float" in found[2]["error"]


def test_a_step_that_fails_ends_the_rows_in_flight_and_not_the_next(
    llm: mp.LLM, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    step, failures = llm.engine.step, [RuntimeError("broken")]

    def failing() -> Any:
        if failures:
            raise failures.pop()
        return step()

    monkeypatch.setattr(llm.engine, "step", failing)
    found = dict(RowEngine(llm.engine, PARAMS, COLUMNS, 2).run(rows()))
    assert [found[place]["error"] is None for place in range(5)] == [False, False, True, True, True]
    assert [found[place]["answer"] for place in range(2, 5)] == expected[2:]


def test_leaving_cancels_what_runs(llm: mp.LLM) -> None:
    running = RowEngine(llm.engine, PARAMS, COLUMNS, 5).run(rows())
    next(running)
    running.close()
    assert not llm.engine.busy
    assert llm.stats().running == 0


def test_prompts_of_rows() -> None:
    assert prompt_of({"a": np.array([1, 2])}, "a") == (1, 2)
    for wrong in (None, 1, [1.5], np.array([1.5]), b"x"):
        with pytest.raises(DataError, match="must be a text or a list of token ids"):
            prompt_of({"a": wrong}, "a")
    assert key_of({"id": np.int64(3)}, "id") == key_of({"id": 3}, "id") == "3"
    with pytest.raises(DataError, match="no key in column 'id'"):
        key_of({}, "id")


def test_rows_in_order() -> None:
    found = [(2, {"id": 2}), (0, {"id": 0}), (4, {"id": 4})]
    kept = {1: {"id": 1}, 3: {"id": 3}}
    assert [row["id"] for row in in_order(found, kept)] == [0, 1, 2, 3, 4]
    assert [row["id"] for row in in_order([], {0: {"id": 0}})] == [0]


def test_files_hold_rows_before_they_are_passed_on(tmp_path: Path) -> None:
    files = AnswerFiles(tmp_path / "new", COLUMNS)
    many = [(n, {"id": np.int64(n), "answer": "x", "error": None}) for n in range(ROWS + 1)]
    kept = files.keep(many)
    next(kept)
    assert len(done := files.keys()) == ROWS
    assert "0" in done
    assert len(list(kept)) == ROWS
    assert files.keys() == {str(n) for n in range(ROWS + 1)}
    list(files.keep([(0, {"id": "failed", "answer": None, "error": "E: no"})]))
    done = files.keys()
    assert "failed" not in done
    assert len(list(files.rows())) == ROWS + 2
    (tmp_path / "new" / "half.part").write_text('{"id": 99')
    assert files.keys() == done, "what was not finished is none"
    (tmp_path / "new" / "other.jsonl").write_text("[1]\n")
    with pytest.raises(DataError, match=r"other.jsonl, line 1, is no row of answers"):
        files.keys()


def test_what_json_does_not_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="a column has a bytes"):
        list(AnswerFiles(tmp_path, COLUMNS).keep([(0, {"id": 1, "image": b"x", "error": None})]))
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="answers cannot be kept in"):
        AnswerFiles(tmp_path / "file", COLUMNS)


def test_a_process_that_starts_again_takes_what_was_written(tmp_path: Path, expected: list[str]) -> None:
    """The first one ends after one row; the second computes the others, and yields all in order."""
    files = AnswerFiles(tmp_path, COLUMNS)
    list(files.keep([(0, {"id": 2, "text": TEXTS[2], "answer": "as written", "error": None})]))
    list(files.keep([(0, {"id": 4, "text": TEXTS[4], "answer": "of an earlier run", "error": None})]))
    block = {"id": np.arange(5), "text": np.array(TEXTS, dtype=object)}
    assert list(rows_of(block))[1] == {"id": 1, "text": TEXTS[1]}
    stage = AnswerRows("pond-recall", CONFIG, None, None, PARAMS, COLUMNS, 4, str(tmp_path), frozenset({"4"}))
    found = list(stage(block))
    assert [int(row["id"][0]) for row in found] == [0, 1, 2, 3], "the earlier run's row is left out"
    assert [row["answer"][0] for row in found] == [*expected[:2], "as written", expected[3]]
    assert files.keys() == {"0", "1", "2", "3", "4"}
    lines = [json.loads(line) for file in tmp_path.glob("*.jsonl") for line in file.read_text().splitlines()]
    assert sorted(line["id"] for line in lines) == [0, 1, 2, 3, 4], "each once"


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        ({"replicas": 0}, "replicas=0"),
        ({"in_flight": True}, "in_flight=True"),
        ({"params": mp.SamplingParams(n=2)}, "a row has one answer"),
    ],
)
def test_numbers_that_are_none(given: dict[str, Any], rule: str) -> None:
    pytest.importorskip("ray.data")
    with pytest.raises(OptionError, match=rule):
        generate_dataset(None, "pond-recall", **given)
