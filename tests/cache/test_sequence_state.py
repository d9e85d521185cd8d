"""Companions: what a layer remembers of its sequences follows them, goes back with a fork and goes with a reset."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from millpond.cache.layer.layer_cache import LayerCache
from millpond.cache.types import PerSequence
from millpond.kernels.args import AttentionShape
from millpond.methods import METHODS
from tests.helpers.papers.fixture import make_layer_cache

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "last queries": ("snapkv", {"window": 4, "kernel": 3}),
    "sums of queries": ("expected_attention", {}),
    "memories": ("d2o", {"sinks": 1}),
    "selective": ("infllm", {"sinks": 1, "local": 4, "block": 3, "representatives": 2, "together": 1}),
}


def go(cache: LayerCache, n: int, seed: int = 0) -> None:
    """A pass of `n` tokens of two sequences."""
    q, k, v = torch.randn(3, 2, 2, n, 8, generator=torch.Generator().manual_seed(seed)).unbind()
    cache.attend(q, k, v, None, AttentionShape(1.0))


def remembered(cache: LayerCache) -> list[tuple[int, Any]]:
    """What each companion knows of each sequence, with the sequence's number."""
    parts = cache.sequence_state
    known = [parts.memories, parts.queries._last, parts.queries._moments, getattr(parts.selective, "_known", {})]
    return [(sequence, value) for part in known for sequence, value in part.items()]


def test_values_follow_their_sequences() -> None:
    known = PerSequence({0: "a", 2: "c"})
    assert known.copy([2, 1, 2]) == {0: "c", 2: "c"}
    assert known.copy([]) == {}
    copy = known.copy()
    copy[1] = "b"
    assert known == {0: "a", 2: "c"}


@pytest.mark.parametrize("case", CASES)
def test_all_of_a_layer_follows(case: str) -> None:
    method, options = CASES[case]
    cache = make_layer_cache(METHODS.get(method)(**options), 20)
    parts = cache.sequence_state
    go(cache, 30)
    before = remembered(cache)
    assert {sequence for sequence, _ in before} == {0, 1}
    cache.select([1, 1, 0])
    assert dict(remembered(cache))[0] is dict(before)[1]
    assert {sequence for sequence, _ in remembered(cache)} == {0, 1, 2}
    cache.reset()
    assert remembered(cache) == []
    assert cache.sequence_state is parts  # which the planner and the attention hold


@pytest.mark.parametrize("case", CASES)
def test_a_fork_goes_back(case: str) -> None:
    method, options = CASES[case]
    cache = make_layer_cache(METHODS.get(method)(**options), 20)
    go(cache, 30)
    before, state = remembered(cache), cache.fork()
    go(cache, 12, seed=1)
    assert any(a is not b for (_, a), (_, b) in zip(before, remembered(cache), strict=True))
    cache.restore(state)
    assert all(a is b for (_, a), (_, b) in zip(before, remembered(cache), strict=True))
