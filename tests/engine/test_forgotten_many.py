"""What answers tell of forgotten spans, against the positions that the inspector of each layer shows."""

from __future__ import annotations

import random
from typing import Any

import pytest

from millpond.engine.engine import Engine
from millpond.engine.outputs import Forgotten
from millpond.engine.request import CacheOptions, Request
from millpond.prompt_marks import PromptMarks
from tests.helpers.engine.helpers import greedy, prompt
from tests.helpers.hf.families import family

METHODS = ("h2o", "snapkv", "ada", "tova", "streaming", "kvmerger", "pyramidkv", "window", "full")


def expected(engine: Engine, name: str, spans: tuple[tuple[int, int], ...]) -> list[Forgotten]:
    """Counted from what `/v1/millpond/memory` shows of each layer."""
    shown = [engine.memory(name, layer) for layer in range(len(engine.layers))]
    heads, held = 0, [0] * max(end for _, end in spans)
    for layer in shown:
        assert layer is not None
        heads += layer.n_kv_heads
        for position in range(len(held)):
            held[position] += round(layer.kept[position] * layer.n_kv_heads)
    found = []
    for begin, end in spans:
        own, n = held[begin:end], max(end - begin, 1)
        part = sum(own) / (n * heads) if own else 1.0
        found.append(Forgotten(begin, end, own.count(0) / n, sum(2 * one < heads for one in own) / n, part))
    return found


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("n_requests", [24, pytest.param(200, marks=pytest.mark.slow)])
def test_it_is_what_the_inspector_shows(n_requests: int) -> None:
    draw = random.Random(n_requests)
    engine = Engine(family("llama").make(head_dim=32, hidden_size=64), page_slots=4, max_step_tokens=32)
    compared = lost = 0
    for first in range(0, n_requests, 8):  # as many as are remembered when they have ended
        asked: dict[str, tuple[tuple[int, int], ...]] = {}
        for n in range(first, min(first + 8, n_requests)):
            length, method = draw.randint(2, 90), METHODS[n % len(METHODS)]
            cuts = sorted(draw.sample(range(length + 1), 3 if length > 2 else 2))
            spans = tuple(zip([0, *cuts], [*cuts, length], strict=True))
            options: dict[str, Any] = {"budget": None if method == "full" else draw.choice(["20%", "50%", 32])}
            options["codec"] = draw.choice(["auto", "rotated4"]) if method in ("h2o", "snapkv", "full") else "auto"
            asked[str(n)] = spans
            engine.add(
                Request(
                    request_id=str(n),
                    prompt=prompt(length),
                    params=greedy(draw.randint(2, 12)),
                    watch=True,
                    marks=PromptMarks(report=spans),
                    cache=CacheOptions(method=method, **options),
                )
            )
        for done in engine.drain():
            found, spans = done.completions[0].forgotten, asked[done.request_id]
            assert list(found) == [pytest.approx(one) for one in expected(engine, done.request_id, spans)]
            compared += 1
            lost += any(one.fewer_than_half for one in found)
    assert compared == n_requests
    assert lost > n_requests // 3
    engine.close()
