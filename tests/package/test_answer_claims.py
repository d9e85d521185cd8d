"""Verdicts of claims that are tried by answers, by steps of a format and by similarity, on rows written here."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs"


def module(name: str) -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(DOCS)
        return importlib.import_module(f"generated.claims.{name}")


def row(method: str, budget: str, score: float, codec: str = "auto", held: float = 0.2) -> dict[str, Any]:
    """Of answers whose interval is a tenth wide."""
    return {
        "method": method,
        "budget": budget,
        "codec": codec,
        "score": {"mean": score, "low": score - 0.05, "high": score + 0.05},
        "bytes": held,
        "questions": 40,
        "contexts": 20,
    }


@pytest.mark.parametrize(
    ("scores", "verdict"),
    [
        ((0.9, 0.9, 0.9), "reproduced"),
        ((0.9, 0.5, 0.5), "partly"),
        ((0.5, 0.5, 0.5), "no difference seen"),
        ((0.1, 0.5, 0.5), "contradicted"),
    ],
)
def test_heads_that_compete(scores: tuple[float, ...], verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = module("answers")
    found = [row("full", "", 1.0)]
    for budget, score in zip(answers.BUDGETS, scores, strict=True):
        found += [row("ada", budget, score), row("pyramidkv", budget, score), row("ems", budget, score)]
        found += [row("snapkv", budget, 0.5), row("h2o", budget, 0.5)]
    monkeypatch.setattr(answers, "read", lambda name: found)
    assert answers.ada().verdict == answers.pyramid().verdict == verdict
    assert answers.ems().verdict == ("partly" if verdict == "reproduced" else verdict), "not 95 % of the full cache"
    found[0]["score"]["mean"] = 0.9
    assert answers.ems().verdict == ("reproduced" if scores[0] == 0.9 else verdict)


@pytest.mark.parametrize(
    ("evicted", "verdict"), [(0.1, "reproduced"), (0.9, "contradicted"), (0.5, "no difference seen")]
)
def test_few_bits_beside_evicting(evicted: float, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = module("answers")
    found = [row("full", "", 1.0), *(row("h2o", budget, evicted, held=0.4) for budget in answers.EVICTED)]
    found += [row("h2o", "20%", 0.5, codec, 0.3) for codec in answers.FORMATS]
    monkeypatch.setattr(answers, "read", lambda name: found)
    assert answers.few_bits("early", "model", "facts")().verdict == verdict


@pytest.mark.parametrize(
    ("peak", "score", "verdict"), [(0.2, 3, "reproduced"), (0.2, 2, "partly"), (9.0, 1, "contradicted")]
)
def test_what_is_held_while_reading(peak: float, score: int, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = module("trained")
    settings = {
        name: {"found": [3] * 4, "peak": [0.5] * 4, "held": [0.5] * 4, "cpu_s": [1.0] * 4} for name in trained.TABLE
    }
    settings["locret:heads=heads.safetensors:prefill=chunks@20%"] |= {"found": [score] * 4, "peak": [peak] * 4}
    data = {"settings": settings, "load": {"facts": 3, "model": "m", "length": 4096}}
    monkeypatch.setattr(trained, "read", lambda name: data)
    found = trained.reading()
    assert found.verdict == verdict
    assert "12 questions on 4 contexts of 4,096" in found.model


@pytest.mark.parametrize(
    ("gated", "alone", "verdict"), [(0.9, 0.5, "reproduced"), (0.9, 0.9, "partly"), (0.5, 0.9, "contradicted")]
)
def test_gates_beside_an_adapter(gated: float, alone: float, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = module("trained")
    found = [row("full", "", 0.9)]
    for seed in range(2):
        found.append(row(f"attention_gate:gate=gated-{seed}.safetensors", "", gated))
        found.append(row(f"attention_gate:gate=lora-{seed}.safetensors:window=4096", "", alone))
    monkeypatch.setattr(trained, "read", lambda name: found)
    assert trained.beside_lora().verdict == verdict


@pytest.mark.parametrize(
    ("kl", "verdict"),
    [
        ((6, 5, 4, 3, 2, 1), "reproduced"),
        ((6, 5, 4, 5, 2, 1), "partly"),
        ((1, 2, 3, 4, 5, 6), "contradicted"),
        ((1, 1, 1, 1, 1, 1), "no difference seen"),
    ],
)
def test_steps_of_a_format(kl: tuple[int, ...], verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    formats = module("formats")
    settings = {
        f"full/kvquant{bits}_{step}": {"wiki": {"kl": [0.1 * one, 0.11 * one], "bytes": [0.2, 0.2]}}
        for bits in (3, 2)
        for step, one in zip(formats.STEPS, kl, strict=True)
    }
    monkeypatch.setattr(formats, "read", lambda name: {"models": {"m": {"prompt": 512, "settings": settings}}})
    assert formats.ladder().verdict == verdict


@pytest.mark.parametrize(
    ("by_layer", "by_text", "drawn", "verdict"),
    [(0.2, 0.01, 0.1, "reproduced"), (0.01, 0.2, 0.1, "contradicted"), (0.2, 0.01, 0.99, "contradicted")],
)
def test_neighbouring_keys(
    by_layer: float, by_text: float, drawn: float, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = module("settings")
    texts = {
        str(text): {
            "beside": [[0.5 + by_layer * layer + by_text * text + 0.001 * n for layer in range(3)] for n in range(4)],
            "random": [[drawn] * 3] * 4,
        }
        for text in range(2)
    }
    own = {"windows": 4, "length": 1024, "texts": texts}
    monkeypatch.setattr(settings, "read", lambda name: {"models": {"m": own}})
    (claim,) = (claim for claim in settings.CLAIMS if claim.says.startswith("neighbouring keys"))
    assert claim.tried().verdict == verdict
