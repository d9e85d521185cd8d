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
            ratio=8.0,
            peak_gb=18.0,
        ),
        row(
            "offload",
            "6.7B, h2o 20%, 512 + 32",
            requests=40,
            tokens_per_s=200.0,
            step_ms=150.0,
            bound_ms=40.0,
            peak_gb=15.0,
            memory="16GB",
        ),
        row(
            "latency",
            "30B, 1 x 7000 + 1024, full",
            latency_s=57.0,
            ratio=1.5,
            prompt_s=2.0,
            step_ms=53.7,
            projected="64 steps",
        ),
        row("storage", "decode, 1.5 bits", tokens=8192, gb_per_s=40.0, bound_gb_per_s=90.0, bound_of="bytes"),
        row("latency", "6.7B, 24 x 2048 + 2048, full", skipped="60.0 GB are more than the device has"),
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
        "| h2o 20% | 120 | 28.8 | 3,000 | 50% | 40.0 |  |",
        "0.40 2.00 x",
        "| full, 16 x 8192 | 12.0 | 10.0 | 2.0 |",
        "| StaticCache | 1 x 8,192 | 0.25 | 30.0 | 8.00 x | 18.0 |",
        "| 6.7B, h2o 20%, 512 + 32 | 40 | 200.0 | 150 | 40 | 15.0 |",
        "| 30B, 1 x 7000 + 1024, full | 57.0 | 1.50 x | 2.00 | 53.7 | 64 steps |",
        "| decode, 1.5 bits | 40.0 | 90 | bytes |",
        "Not run: `latency` 6.7B, 24 x 2048 + 2048, full: 60.0 GB are more than the device has.",
        "2 goals are met",
        "| step | full, 16 x 8192 | at most 1.4 x its bound | 1.5 | not met |",
        "| storage | decode, 1.5 bits | at least 50 GB/s | 40 | not met |",
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


def served(setting: str, rate: float, bound: float) -> dict[str, Any]:
    """A row of 256 tokens after 8,192."""
    rates = {"tokens_per_s": rate, "bound_tokens_per_s": bound, "share_of_bound": rate / bound}
    return row(
        "served",
        f"{setting}, + 256",
        prompt=8192,
        requests=27,
        prompt_s=0.33,
        step_ms=17.0,
        projected="a sample",
        **rates,
    )


def test_what_is_gained_end_to_end_stands_beside_what_can_be() -> None:
    text = gpu_section([served("full", 400.0, 450.0), served("h2o 20%", 500.0, 675.0)])
    assert "| full, + 256 | 27 | 400 | 89% | 1.00 x | 1.00 x | 0.33 | 17.0 | a sample |" in text
    assert "| h2o 20%, + 256 | 27 | 500 | 74% | 1.25 x | 1.50 x | 0.33 | 17.0 | a sample |" in text
    assert "1 of 2 goals are met" in text


def test_caches_of_two_lengths_have_a_table_each() -> None:
    common = {"requests": 10, "limit_gb": 30.0, "kv_bytes_each": 10**9, "bound_tokens_per_s": 6000.0, "ms": 40.0}
    rows = [
        row("steady", name, context=context, tokens_per_s=rate, **common)
        for name, context, rate in (
            ("full", 8192, 900.0),
            ("full, 32768", 32768, 200.0),
            ("h2o 20%, 32768", 32768, 720.0),
        )
    ]
    text = gpu_section(rows)
    assert "As many requests of 32,768 tokens as 30 GB" in text
    assert "| h2o 20% | 10 | 10.0 | 720 | 12% | 40.0 |" in text
    assert "| steady | h2o 20%, 32768 | at least 3.5 x full, 32768 | 3.6 | met |" in text


def test_two_cards_have_tables_of_their_own() -> None:
    rows = [row("tokens: methods", "h2o", ok=True), row("tokens: methods", "h2o", ok=True) | {"card": "another"}]
    assert gpu_section(rows).count("### ") == 2
