"""Means and intervals, against numbers worked out another way."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from millpond_lab.evals.decoding.record import Cell, Record
from millpond_lab.evals.harness.summary import asked_text, markdown, score_text, summarise

CELL = Cell("m", "h2o", "20%", "auto", "t", "aware", 3)


def record(
    sample: str, score: float, weight: float = 1.0, question: int = 0, failure: str = "", **extra: float
) -> Record:
    return Record(
        CELL.key,
        sample,
        question,
        "",
        score,
        weight,
        10,
        0.25,
        0 if failure else 100,
        0 if failure else 400,
        failure,
        extra=extra,
    )


def test_a_share_of_right_answers_has_the_interval_of_its_binomial() -> None:
    n, right = 400, 300
    row = summarise(CELL, [record(str(i), float(i < right)) for i in range(n)], "generate")
    spread = 1.96 * math.sqrt(0.75 * 0.25 / n)
    assert row.score == 0.75
    assert row.low == pytest.approx(0.75 - spread, abs=0.006)
    assert row.high == pytest.approx(0.75 + spread, abs=0.006)
    assert (row.n, row.failures, row.better, row.kv_bytes) == (n, 0, "higher", 100)


def test_questions_of_one_sample_are_drawn_together() -> None:
    """Ten questions that always agree tell no more than one."""
    once = [record(str(i), float(i % 2)) for i in range(30)]
    tenfold = [record(str(i), float(i % 2), question=q) for i in range(30) for q in range(10)]
    a, b = summarise(CELL, once, "generate"), summarise(CELL, tenfold, "generate")
    assert (a.low, a.high) == (b.low, b.high)
    assert b.n == 300


def test_perplexity_is_the_exponential_of_the_mean_over_tokens() -> None:
    row = summarise(CELL, [record("a", 1.0, 30), record("b", 2.0, 10)], "perplexity")
    assert row.score == pytest.approx(math.exp(1.25))
    assert row.low == pytest.approx(math.exp(1.0))
    assert row.high == pytest.approx(math.exp(2.0))
    assert row.better == "lower"


def test_failures_count_as_wrong_but_tell_nothing_of_memory() -> None:
    row = summarise(CELL, [record("a", 1.0), record("b", 0.0, failure="too long")], "generate")
    assert (row.score, row.failures, row.kv_bytes, row.kept_share) == (0.5, 1, 100, 0.25)


def test_perplexity_leaves_failures_out_and_has_no_score_if_nothing_is_left() -> None:
    lost = record("b", 0.0, 0.0, failure="too long")
    assert summarise(CELL, [record("a", 1.0, 30), lost], "perplexity").score == pytest.approx(math.e)
    none = summarise(CELL, [lost], "perplexity")
    assert math.isnan(none.score)
    assert score_text(none) == ("none", "all failed")
    assert "| none | all failed |" in markdown([none])


def test_what_else_was_measured_is_averaged_by_weight() -> None:
    row = summarise(CELL, [record("a", 1.0, 3, kl=0.2), record("b", 1.0, 1, kl=0.6), record("c", 1.0, 9)], "fidelity")
    assert row.extra == pytest.approx({"kl": 0.3})


def test_the_tokens_that_were_scored_are_counted_and_shown() -> None:
    fed = [record("a", 1.0, 30), record("b", 2.0, 10), record("c", 0.0, 12.0, failure="too long")]
    rows = [summarise(CELL, fed, kind) for kind in ("perplexity", "fidelity")]
    assert [row.scored_tokens for row in rows] == [40, 40]
    assert summarise(CELL, fed, "generate").scored_tokens == 0
    assert "| 3, 40 tokens scored | 1 |" in markdown(rows)
    more = replace(rows[0], scored_tokens=1200)
    assert asked_text([*rows, more], "questions") == "3 questions, 40 to 1,200 tokens scored"
    assert asked_text([replace(rows[0], n=1, scored_tokens=0)], "questions") == "1 question"
