"""A decoding step whose layers run in one native call: who gets one, and that it changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from millpond.engine.engine import Engine
from millpond.errors import NumericsError
from millpond.kernels import native
from millpond.models.lean.decoder import Decoder
from tests.helpers.engine.helpers import BY_LAYER, METHODS, add, ask, engine_for, finish, greedy, tokens

pytestmark = pytest.mark.skipif(not native.is_available(), reason="installed without native kernels")


def answers(engine: Engine) -> dict[str, list[int]]:
    add(engine, *(ask(length, greedy(12)) for length in (40, 57)))
    done = {name: tokens(output) for name, output in finish(engine).items()}
    engine.close()
    return done


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of each step that runs in one call, from now on."""
    steps: list[int] = []
    real = Decoder.step

    def step(self: Decoder, ids: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        steps.append(len(ids))
        return real(self, ids, *rest)

    monkeypatch.setattr(Decoder, "step", step)
    return steps


@pytest.mark.in_turns(0, of=2)
@pytest.mark.parametrize("method", METHODS)
def test_tokens_are_those_of_layer_by_layer(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = counted(monkeypatch)
    found = answers(engine_for(method))
    assert (len(steps) == 0) == (method in BY_LAYER)
    monkeypatch.setattr(Decoder, "in_one_call", lambda self, n: None)
    assert answers(engine_for(method)) == found


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "opt", "gpt_neox"])
def test_who_gets_one(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = counted(monkeypatch)
    found = answers(engine_for(family=family))
    assert bool(steps) == (family in ("llama", "mistral", "qwen2"))
    monkeypatch.setattr(Decoder, "in_one_call", lambda self, n: None)
    assert answers(engine_for(family=family)) == found


def test_nan_ends_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_for()
    add(engine, ask(40, greedy(20)))
    while not any(output.completions[0].token_ids for output in engine.step()):
        pass
    monkeypatch.setattr(native.Layers, "__call__", lambda self, x, *rest: torch.full((2, len(x), 4), torch.nan))
    output = finish(engine)["40"]
    assert isinstance(output.error, NumericsError)
    assert "attention is NaN" in str(output.error)
    assert len(tokens(output)) < 20
    engine.close()
