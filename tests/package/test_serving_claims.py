"""Verdicts of the claims about serving and layouts follow from rows: rows that say otherwise turn them."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def serving(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "docs")
    return importlib.import_module("generated.claims.serving")


@pytest.fixture
def layouts(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "docs")
    return importlib.import_module("generated.claims.layouts")


def verdict_of(serving: Any, monkeypatch: pytest.MonkeyPatch, claim: str, rows: list[dict[str, Any]]) -> str:
    load = dict.fromkeys(("requests", "repeats", "prompts", "shared", "own", "pages", "queries", "picked", "tokens"), 2)
    monkeypatch.setattr(serving, "read", lambda name: {"load": load | {"parameters": 10**8}, "rows": rows})
    verdict = getattr(serving, claim)().verdict
    assert isinstance(verdict, str)
    return verdict


@pytest.mark.parametrize(
    ("slower", "expected"), [(2.0, "reproduced"), (1.05, "partly"), (0.5, "contradicted"), (1.0, "no difference seen")]
)
def test_batches(serving: Any, monkeypatch: pytest.MonkeyPatch, slower: float, expected: str) -> None:
    seconds = {"batch": [1.0, 2.0, 3.0], "arrival": [slower, 2 * slower, 3 * slower], "sorted": [1.0, 2.0, 3.0]}
    parts = {f"no {part}": seconds["arrival"] for part in ("groups", "order", "memory", "one call")}
    row = {"degree": 16, "pool": 0.25, "answers": 8, "read": {"arrival": 20, "batch": 10}, "cpu_s": seconds | parts}
    assert verdict_of(serving, monkeypatch, "batch_grid", [row, row | {"answers": "unequal"}]) == expected
    wanted = "reproduced" if slower > 1 else "no difference seen"
    assert verdict_of(serving, monkeypatch, "batch_parts", [row, row | {"answers": "unequal"}]) == wanted
    needless = row | {"cpu_s": seconds | parts | {"no order": seconds["batch"]}}
    assert verdict_of(serving, monkeypatch, "batch_parts", [needless]) != "reproduced"


@pytest.mark.parametrize(
    ("ratio", "expected"), [(1.9, "reproduced"), (1.2, "partly"), (1.0, "no difference seen"), (0.7, "contradicted")]
)
def test_shared_prompts(serving: Any, monkeypatch: pytest.MonkeyPatch, ratio: float, expected: str) -> None:
    once, each = ({"kv_bytes": n, "read_cpu_s": n} for n in (10, 100))
    row: dict[str, Any] = {"prompt": 1024, "sequences": 16, "new_tokens": 64, "once": once, "each": each}
    row |= {f"once over {other}": [ratio, ratio - 0.1, ratio + 0.1] for other in ("each", "held once")}
    assert verdict_of(serving, monkeypatch, "shared_decoding", [row]) == expected
    assert verdict_of(serving, monkeypatch, "shared_memory", [row]) == "reproduced"
    assert verdict_of(serving, monkeypatch, "shared_memory", [row | {"once": each}]) == "partly"


@pytest.mark.parametrize(
    ("share", "tokens", "times"),
    [(0.2, "reproduced", "reproduced"), (0.9, "partly", "partly"), (1.2, *["contradicted"] * 2)],
)
def test_stored_chunks(serving: Any, monkeypatch: pytest.MonkeyPatch, share: float, tokens: str, times: str) -> None:
    row = {"in_flight": 8, "seed": 0, "repeated": 0.75, "same": 1.0}
    rows = [
        row | {"way": way} | dict.fromkeys(("read", "cpu_s", "latency", "first"), share if way == "both" else 1.0)
        for way in ("plain", "prefix", "chunks", "both")
    ]
    assert verdict_of(serving, monkeypatch, "served_tokens", rows) == tokens
    assert verdict_of(serving, monkeypatch, "served_times", rows) == times


@pytest.mark.parametrize(("gain", "expected"), [(3.5, "reproduced"), (1.5, "partly"), (0.5, "contradicted")])
def test_merging_in_fixed_memory(serving: Any, monkeypatch: pytest.MonkeyPatch, gain: float, expected: str) -> None:
    load = {"methods": ["full", "d2o", "h2o"], "whole": 4, "layers": 6, "kv_heads": 16, "requests": 24}
    rows = [
        {"method": method, "tokens_per_s": rate, "most_in_flight": 24}
        for method, rate in (("full", 100.0), ("d2o", 100 * gain), ("h2o", 200.0))
        for _ in range(3)
    ]
    data = {"load": load | {"prompt": 512, "answer": 1024}, "results": rows, "kv_bytes": 1 << 27}
    monkeypatch.setattr(serving, "read", lambda name: data)
    assert serving.d2o().verdict == expected


@pytest.mark.parametrize(("gain", "expected"), [(20.0, "reproduced"), (1.5, "partly"), (0.5, "contradicted")])
def test_layouts(layouts: Any, monkeypatch: pytest.MonkeyPatch, gain: float, expected: str) -> None:
    rows = [
        {"load": "chat", "kind": kind, "layout": layout, "seed": seed, "scales": [[1.0, scale]], "goodput": 1 / scale}
        for kind, layout, scale in (
            ("apart", "good", 0.5),
            ("apart", "bad", 9.0),
            ("together, steps of 512", "1 both", 0.5 * gain),
            ("together, vLLM's times", "1 both", 0.5 * gain),
        )
        for seed in range(3)
    ]
    assert verdict_of(layouts, monkeypatch, "tighter_limits", rows) == expected
    assert verdict_of(layouts, monkeypatch, "goodput", rows) == expected


def test_wrong_bits(layouts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def rows(right: int, wrong: int) -> list[dict[str, Any]]:
        at = {0: right, 5: right, 20: wrong, 50: 199}
        found = [{"rule": "belady", "wrong": None, "misses": 100}, {"rule": "lru", "wrong": None, "misses": 200}]
        found += [{"rule": "mark0", "wrong": share, "misses": misses, "bound": 250} for share, misses in at.items()]
        return [*found, {"rule": "learned", "wrong": 50, "misses": 201}]

    assert verdict_of(layouts, monkeypatch, "paging", rows(100, 150)) == "reproduced"
    assert verdict_of(layouts, monkeypatch, "paging", rows(100, 240)) == "partly"
    assert verdict_of(layouts, monkeypatch, "paging", rows(120, 150)) == "contradicted"
    over = [row | {"bound": 90} if row["rule"] == "mark0" else row for row in rows(100, 150)]
    assert verdict_of(layouts, monkeypatch, "paging", over) == "partly"
