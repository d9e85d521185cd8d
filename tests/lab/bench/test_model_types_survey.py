"""Tiny models of the types of transformers: what the survey says of them is so, and no type gets worse."""

from __future__ import annotations

import dataclasses
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import millpond as mp
from millpond_lab.bench.model_types import page as surveys
from millpond_lab.bench.model_types.greedy import Run, Wrong, compare, generated, masked_run
from millpond_lab.bench.model_types.page import render
from millpond_lab.bench.model_types.probe import (
    BROKEN,
    EQUAL,
    NOT_TRIED,
    REFUSED,
    SETTINGS,
    SMALL,
    WRONG,
    Finding,
    Outcome,
    probe,
)
from millpond_lab.bench.model_types.tiny_model import causal_types, composite_types, tiny_model

DATA: dict[str, Any] = json.loads(
    (Path(__file__).parents[3] / "benchmarks" / "results" / "model-types.json").read_text(encoding="utf-8")
)
COMMITTED = {row["model_type"]: Finding.of(row) for row in (*DATA["text"], *DATA["composite"])}
#: One of each kind: windows in attention, mask and layers, latents, experts, learned positions, a model inside another.
FAST = [
    "llama",
    "mistral",
    "qwen3",
    "gpt2",
    "gemma2",
    "phimoe",
    "deepseek_v3",
    "afmoe",
    "gpt_oss",
    "qwen2_vl",
    "paligemma",
    "mamba",
    "bloom",
    "moshi",
]


def installed() -> dict[str, str]:
    return causal_types() | composite_types()


def check(kind: str, found: Finding) -> None:
    """No setting is worse than committed."""
    if kind not in installed():
        pytest.skip(f"this transformers has no type {kind!r}; the committed results are of {DATA['transformers']}")
    committed = COMMITTED[kind]
    assert found.status not in (WRONG, BROKEN), found
    for name, outcome in committed.outcomes.items():
        if outcome.status == EQUAL:
            assert found.outcomes.get(name, Outcome(found.status, found.reason)).status == EQUAL, found
    if committed.status != NOT_TRIED:
        assert found.status != NOT_TRIED, found.reason


@pytest.mark.in_turns(0, of=2)
@pytest.mark.parametrize("kind", FAST)
def test_a_dozen_types(kind: str) -> None:
    check(kind, probe(kind))


@pytest.mark.slow
@pytest.mark.parametrize("kind", COMMITTED)
def test_every_type(kind: str) -> None:
    check(kind, next(surveys.survey([kind])) if kind in installed() else COMMITTED[kind])


def test_committed_results_have_no_defects() -> None:
    assert not [kind for kind, finding in COMMITTED.items() if finding.status in (WRONG, BROKEN)]
    assert all(
        finding.reason or all(o.reason for o in finding.outcomes.values() if o.status != EQUAL)
        for finding in COMMITTED.values()
    )


@cache
def llama_with_few() -> tuple[PreTrainedModel, Run]:
    model = tiny_model("llama")
    with torch.no_grad(), mp.compress(model, "h2o", SMALL) as held:
        return model, generated(model, held)


def test_the_mask_hides_what_left() -> None:
    model, run = llama_with_few()
    with torch.no_grad():
        compare(run, masked_run(model, run), "")
        with pytest.raises(Wrong, match="everything shown: logits differ"):
            compare(run, masked_run(model, run, hide=False), "everything shown")


def test_one_entry_that_is_hidden_too_much_is_seen() -> None:
    model, run = llama_with_few()
    short = [{n: [[h[1:] for h in heads] for heads in layer] for n, layer in held.items()} for held in run.held]
    with torch.no_grad(), pytest.raises(Wrong, match="logits differ"):
        compare(run, masked_run(model, dataclasses.replace(run, held=short)), "")


def test_a_window_that_is_lost_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The defect that the survey found in phimoe."""
    monkeypatch.setattr("millpond.hf.stock_attention.window_of", lambda mask: 12 if mask is None else 1000)
    assert probe("phimoe").status == WRONG


@pytest.mark.slow
def test_a_crash_a_hang_and_a_flood_end_one_type_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(surveys, "SECONDS", 20.0)
    monkeypatch.setattr(surveys, "MEMORY_BYTES", 6 << 30)
    programs = [
        "__import__('os').abort()",
        "bytearray(1 << 40)",
        "__import__('millpond_lab.bench.model_types.probe').bench.model_types.finding.Finding('x', 'equal')",
    ]
    found = list(surveys.survey(programs, eval))
    assert [finding.status for finding in found] == [BROKEN, BROKEN, EQUAL]
    assert found[0].reason == "its process ended with -6"
    monkeypatch.setattr(surveys, "SECONDS", 1.0)
    hung = next(surveys.survey(["__import__('time').sleep(99)"], eval))
    assert hung.reason == "took longer than 1 seconds"


def test_the_page_says_why() -> None:
    some = {name: Outcome(EQUAL) for name in SETTINGS} | {"streaming": Outcome(REFUSED, "X (model type 'b') has none")}
    text = [
        Finding("a", REFUSED, "XForCausalLM has layers of sand"),
        Finding("b", EQUAL, "", (2, 3), some),
        Finding("c", NOT_TRIED, "is mute"),
    ]
    page = render(
        {"torch": "1", "transformers": "2", "command": "x", "text": [f.as_dict() for f in text], "composite": []}
    )
    assert "1 equal, 1 refused, 1 not tried" in page
    assert "| `a` | refused | refused | refused | refused | refused |  | has layers of sand |" in page
    assert "| `b` | equal | equal | refused | equal | equal | 2 of 3 | `streaming`: has none |" in page
    assert "| `c` | not tried | not tried | not tried | not tried | not tried |  | is mute |" in page
