"""Goals of the GPU benchmarks: which cells have one, what it is compared with, and when it is met."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[4] / "benchmarks" / "gpu"))

from gpu_goals import GOALS, goal_text, to_show, verdict_text, verdicts


def row(section: str, cell: str, **figures: Any) -> dict[str, Any]:
    return {"section": section, "cell": cell, **figures}


def told(*rows: dict[str, Any]) -> list[str]:
    return [verdict_text(verdict) for verdict in to_show(verdicts(rows))]


@pytest.mark.parametrize(
    ("cell", "most"),
    [
        ("full, 1 x 4096", 1.3),
        ("h2o 20%, 1 x 4096", 1.3),
        ("full, 48 x 8192", 1.4),
        ("h2o 20%, 64 x 8192", 1.4),
        ("h2o 20%, int4, 16 x 8192", 1.6),
    ],
)
def test_a_step_is_compared_with_its_bound(cell: str, most: float) -> None:
    assert goal_text("step", cell) == f"at most {most:g} x its bound"
    (met,), (missed,) = (verdicts([row("step", cell, ratio=most + more)]) for more in (-0.01, 0.01))
    assert met.met
    assert not missed.met


def test_a_cell_without_a_goal_has_none() -> None:
    assert goal_text("step", "fp8, 16 x 8192") == ""
    assert told(row("step", "fp8, 16 x 8192", ratio=9.0)) == []


def test_a_prompt_is_compared_with_the_faster_one_of_transformers() -> None:
    rows = [
        row("prompt", "full, 8192", first_token_s=0.3),
        row("prompt", "transformers sdpa, 8192", first_token_s=0.4),
        row("prompt", "transformers flash_attention_2, 8192", first_token_s=0.25),
        row("prompt", "transformers sdpa, 32768", first_token_s=0.1),  # of another length
        row("prompt", "h2o 20%, 8192", first_token_s=0.36),
    ]
    assert told(*rows) == [
        "at most 1 x transformers with flash attention: 1.2, not met",
        "at most 1.25 x full, 8192: 1.2, met",
    ]


def test_rates_are_compared_with_the_fastest_other() -> None:
    rows = [
        row("generate", "full, 16 x 8192", tokens_per_s=220.0),
        row("generate", "DynamicCache, 16 x 8192", tokens_per_s=100.0),
        row("generate", "compiled StaticCache, 16 x 8192", tokens_per_s=250.0),
    ]
    assert told(*rows) == [
        "at least 1 x the fastest of theirs: 0.88, not met",
        "at least 2 x DynamicCache, 16 x 8192: 2.2, met",
    ]


def test_of_goals_that_one_cell_is_enough_for_the_best_is_shown() -> None:
    rows = [
        row("offload", f"6.7B, {engine}, 512 + {new}", tokens_per_s=rate)
        for new, rates in ((32, (200.0, 100.0, 20.0)), (512, (300.0, 60.0, 10.0)))
        for engine, rate in zip(("h2o 20%", "full", "accelerate 4"), rates, strict=True)
    ]
    assert told(*rows) == [
        "at least 29 x Accelerate in one cell: 30, met",
        "at least 3 x the full cache in one cell: 5, met",
    ]


def test_a_comparison_without_the_other_cell_or_with_an_error_is_left_out() -> None:
    assert told(row("steady", "h2o 20%", tokens_per_s=5000.0)) == []
    assert told(row("steady", "h2o 20%", error="no"), row("steady", "full", tokens_per_s=900.0)) == []
    assert told(row("steady", "h2o 20%", tokens_per_s=5000.0), row("steady", "full", skipped="no room")) == []


def test_every_goal_has_one_bound() -> None:
    assert all((goal.least is None) != (goal.most is None) for goal in GOALS)
