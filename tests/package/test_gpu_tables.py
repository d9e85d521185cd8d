"""The tables of GPUs: every section of rows has one, an error is named, and what has not run is not there."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "docs"))

from generated.gpu_tables import gpu_section

BASE = {"card": "a card", "torch": "2.11", "triton": "3.6", "day": "2026-11-27", "seconds": 1.0}


def row(section: str, cell: str, **figures: Any) -> dict[str, Any]:
    return {"section": section, "cell": cell, **BASE, **figures}


def test_each_section_has_a_table() -> None:
    rows = [
        row("rates", "device", copy_bytes_per_s=4e12, flop_per_s=8e14, upload_bytes_per_s=5e10),
        row("tokens: methods", "h2o", ok=True),
        row("tokens: methods", "d2o", ok=False),
        row("step", "full, 16 x 8192", batch=16, context=8192, ms=12.0, ratio=1.5, caches="copies"),
        row(
            "steady",
            "h2o 20%",
            requests=120,
            context=8192,
            limit_gb=30.0,
            kv_bytes_each=240_000_000,
            tokens_per_s=3000.0,
            bound_tokens_per_s=6000.0,
            ms=40.0,
        ),
        row("prompt", "full, 8192", tokens=8192, first_token_s=0.4, ratio=2.0),
        row(
            "profile",
            "full, 16 x 8192",
            ms=12.0,
            device_ms=10.0,
            gap_ms=2.0,
            kernels=700.0,
            launches={"cudaGraphLaunch": 1.0},
            waits={"cudaStreamSynchronize": {"calls": 1.0, "ms": 1.0}},
        ),
        row(
            "generate",
            "StaticCache, 1 x 8192",
            cache="StaticCache",
            batch=1,
            prompt=8192,
            first_token_s=0.25,
            ms=30.0,
            peak_gb=18.0,
        ),
        row("offload", "h2o 20%", requests=40, tokens_per_s=200.0, peak_gb=15.0, memory="16GB"),
        row("kernels", "decode plain, 16 x 8192", page=64, batch=16, stored=8192, rule="plain", share_of_copy=0.9),
        row("kernels", "prefill, 2048", rows=2048, ms=0.2, ms_with_sums=0.3, ms_torch=0.25),
        row("kernels", "decode codes, int4", codec="int4", batch=16, stored=8192, ms=0.05),
        row("step", "fp8, 16 x 8192", error="ValueError: no"),
    ]
    text = gpu_section(rows)
    for found in (
        "4.00 TB/s",
        "1 of 2 in methods. Not in: methods d2o",
        "| full | 12.0 1.50 x |",
        "| h2o 20% | 120 | 28.8 | 3,000 | 50% | 40.0 |",
        "0.40 2.00 x",
        "| full, 16 x 8192 | 12.0 | 10.0 | 2.0 |",
        "| StaticCache | 1 x 8,192 | 0.25 | 30.0 | 18.0 |",
        "| h2o 20% | 40 | 200.0 | 15.0 |",
        "| 16 x 8,192 | 90% |",
        "| 2,048 | 0.20 | 0.30 | 0.25 |",
        "| int4 | 0.050 |",
        "Ended with an error, which the rows have: `step` fp8",
    ):
        assert found in text, found


def test_what_has_not_run_has_no_table() -> None:
    text = gpu_section([row("tokens: methods", "h2o", ok=True)])
    assert "1 of 1 in methods" in text
    assert "|" not in text


def test_two_cards_have_tables_of_their_own() -> None:
    rows = [row("tokens: methods", "h2o", ok=True), row("tokens: methods", "h2o", ok=True) | {"card": "another"}]
    assert gpu_section(rows).count("### ") == 2
