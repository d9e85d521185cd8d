"""The scripts of the long stream: what they score, and how it is added up."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from millpond_lab.bench.generate.candidates import ModelShape, draw_prompts

QUALITY = Path(__file__).parents[3] / "benchmarks" / "quality"
SHAPE = ModelShape(layers=1, width=64, heads=2, kv_heads=1, head_dim=32, ffn=32, vocab=64)


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """long_stream.py and long_stream_page.py."""
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(str(QUALITY))
    return importlib.import_module("long_stream"), importlib.import_module("long_stream_page")


def test_every_token_is_scored_once_in_passes_of_any_size(scripts: tuple[Any, Any]) -> None:
    run, page = scripts
    model, ids = SHAPE.build(0).float(), draw_prompts(SHAPE, 1, 101, 0)
    logits = model(ids[:, :-1]).logits[0]
    whole = float(torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum").detach())
    for rows in (1, 7):
        records = list(run.stream(model, ids, "window", 512, rows, keep=40))
        found = page.passes(({"rows": rows, "tokens": 100}, records))
        assert sum(count for _, count, _ in found) == 100
        assert sum(loss for _, _, loss in found) == pytest.approx(whole, abs=0.1)
        assert records[-1]["seen"] == 100


def test_a_small_cache_stays_small(scripts: tuple[Any, Any]) -> None:
    run, _ = scripts
    records = list(run.stream(SHAPE.build(0), draw_prompts(SHAPE, 1, 201, 0), "streaming", 64, 8, keep=100))
    assert [record["stored"] for record in records] == [64, 64]


def test_the_reference_is_paired_on_the_tokens_that_both_scored(scripts: tuple[Any, Any]) -> None:
    run, page = scripts
    model, ids = SHAPE.build(0).float(), draw_prompts(SHAPE, 1, 101, 0)
    records = list(run.stream(model, ids, "window", 512, 4, keep=50))
    windows = list(run.windows(model, ids, 2, length=8))
    pair = page.paired(({"rows": 4, "tokens": 100}, records), ({}, windows))
    assert (pair["windows"], pair["tokens"]) == (2, 8)
    half = windows[1]["begin"]
    logits = model(ids[:, half - 4 : half + 4]).logits[0, 4:]
    loss = float(torch.nn.functional.cross_entropy(logits, ids[0, half + 1 : half + 5], reduction="sum").detach())
    assert windows[1]["losses"][0] == pytest.approx(loss, abs=1e-2)
    assert math.isfinite(pair["perplexity"])
    assert pair["perplexity"] == pytest.approx(math.exp(sum(w["losses"][0] for w in windows) / 8), rel=0.1)
