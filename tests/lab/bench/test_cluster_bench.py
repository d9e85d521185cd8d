"""`millpond bench cluster`: differences within a round, the report, and settings that are refused."""

from __future__ import annotations

from typing import Any

import pytest

from millpond.errors import OptionError
from millpond_lab.bench.cluster import BenchServer, ClusterBench, markdown, row_of


def one(turn: int, layout: str, rate: float, ttft: float, **more: float) -> dict[str, Any]:
    return {
        "round": turn,
        "layout": layout,
        "failed": 0,
        "tokens_per_s": rate,
        "ttft_s": ttft,
        "tpot_s": 0.01,
        "e2e_s": 1.0,
        **more,
    }


RUNS = [
    one(0, "single", 100, 0.010),
    one(0, "split", 90, 0.030, moved=2, move_s=0.05, moved_bytes=4000),
    one(1, "split", 40, 0.070, moved=2, move_s=0.07, moved_bytes=8000),
    one(1, "single", 50, 0.060),
    one(2, "single", 100, 0.020),
    one(2, "split", 100, 0.025, moved=0, move_s=0.0, moved_bytes=0),
]


def test_differences_are_those_within_a_round() -> None:
    """The machine was half as fast in one of them."""
    row = row_of("split", RUNS)
    assert row["rate"] == {"median": 0.9, "low": 0.8, "high": 1.0}
    assert row["ttft_more_s"] == pytest.approx({"median": 0.010, "low": 0.005, "high": 0.020})
    assert (row["moved"], row["move_s"], row["moved_bytes"]) == (4, pytest.approx(0.03), 3000)
    single = row_of("single", RUNS)
    assert single["rate"] == {"median": 1.0, "low": 1.0, "high": 1.0}
    assert single["move_s"] is None


def test_the_report() -> None:
    data = {
        "hardware": "a machine",
        "software": "torch",
        "command": "millpond bench cluster",
        "runs": RUNS,
        "settings": {"requests": 2, "prompt": "8", "output": "4", "users": 2, "rounds": 3},
        "results": [row_of(name, RUNS) for name in ("single", "split")],
    }
    lines = markdown(data).splitlines()
    assert lines[-1].startswith("| split | 0 | 90.0 | 0.900 [0.800, 1.000] | 30.0 | +10.0 [+5.0, +20.0] |")
    assert lines[-1].endswith("| 30.0 | 3 |")


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        ({"layouts": ("split",)}, "'single' must be one of them"),
        ({"layouts": ("single", "splits")}, "'splits'"),
        ({"layouts": ("single", "single")}, "each come once"),
        ({"rounds": 0}, "rounds=0"),
    ],
)
def test_settings_that_are_refused(given: dict[str, Any], rule: str) -> None:
    with pytest.raises(OptionError, match=rule):
        ClusterBench(**given)


@pytest.mark.slow
def test_a_server_that_does_not_start_says_why() -> None:
    with pytest.raises(OptionError, match=r"did not start: .+"):
        BenchServer(["--model", "no-such-model-anywhere"])
