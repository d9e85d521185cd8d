"""Engines whose methods evict and what their requests hold."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from millpond.cache.serialization import to_tensors
from millpond.engine.engine import Engine
from millpond.engine.request_state import RequestState

#: Methods whose heads keep other tokens each, and some whose heads keep the same ones.
EVICTING: dict[str, dict[str, Any]] = {
    "h2o": {"method": "h2o", "budget": 240},
    "snapkv": {"method": "snapkv", "budget": 240},
    "ada": {"method": "ada", "budget": 240},
    "window": {"method": "window", "budget": 240},
}


def state_of(engine: Engine, name: str) -> RequestState:
    state = engine._requests.get(name)
    assert state is not None
    return state


def held(engine: Engine, name: str, *, later_prompts: bool = False) -> list[dict[str, Tensor]]:
    """What the layers hold of the first answer of a request that decodes."""
    state = state_of(engine, name)
    holder = state.cache()
    assert holder is not None
    batch_cache, sequence = holder
    single_cache = state.group.cache_factory.make_cache()
    batch_cache.copy_to([sequence], single_cache)
    found = [to_tensors(layer, later_prompts=later_prompts) for layer in single_cache.layers]
    single_cache.clear()
    return found
