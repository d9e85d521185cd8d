"""Companions: what a layer remembers of its sequences follows them, goes back with a fork and goes with a reset."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from millpond.cache.layer.layer_cache import LayerCache
from millpond.cache.state.sequence_state import QueryBuffer
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


class Waits(TorchDispatchMode):
    """Refuses to read a number."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default, "the host waits for the device"
        return func(*args, **(kwargs or {}))


def buffer_of(method: str, **options: Any) -> QueryBuffer:
    return QueryBuffer(METHODS.get(method)(**options))


QUERIES = torch.randn(2, 30, 8, generator=torch.Generator().manual_seed(5))


def remember(buffer: QueryBuffer, *spans: tuple[int, int]) -> None:
    for begin, end in spans:
        at = torch.arange(begin, end, dtype=torch.int32)
        buffer.remember(0, QUERIES[:, begin:end], at, (begin, end), None)


@pytest.mark.parametrize("sizes", [[30], [10, 18, 2], [1, 1, 28], [25, 3, 1, 1], [1] * 30])
def test_the_last_queries_of_chunks_are_those_of_the_text(sizes: list[int]) -> None:
    buffer, ends = buffer_of("snapkv", window=4, kernel=3), np.cumsum(sizes).tolist()
    with Waits():
        remember(buffer, *zip([0, *ends], ends, strict=False))
    q, q_pos = buffer.last(0)
    assert torch.equal(q, QUERIES[:, -4:])
    assert q_pos.tolist() == [26, 27, 28, 29]


def test_queries_that_do_not_follow_begin_anew() -> None:
    buffer = buffer_of("snapkv", window=4, kernel=3)
    remember(buffer, (0, 20), (22, 24))
    assert buffer.last(0)[1].tolist() == [22, 23]


def test_remembered_queries_go_on_in_other_buffers() -> None:
    first = buffer_of("snapkv", window=4, kernel=3)
    remember(first, (0, 20))
    adopted, copied, joined = buffer_of("snapkv", window=4, kernel=3), first.copy([0]), first.copy([])
    adopted.adopt(0, first.last(0))
    joined.join(first, 0)
    for other in (adopted, copied, joined):
        remember(other, (20, 22))
        assert other.last(0)[1].tolist() == [18, 19, 20, 21]
        assert torch.equal(other.last(0)[0], QUERIES[:, 18:22])
    assert first.last(0)[1].tolist() == [16, 17, 18, 19]


@pytest.mark.parametrize("sizes", [[30], [1, 1, 28], [6, 24], [3, 4, 23]])
def test_sums_of_chunks_leave_out_the_sinks(sizes: list[int]) -> None:
    buffer, ends = buffer_of("expected_attention", sinks=4), np.cumsum(sizes).tolist()
    with Waits():
        remember(buffer, *zip([0, *ends], ends, strict=False))
    moments = buffer.moments(0)
    assert moments is not None
    assert moments.count == 26
    torch.testing.assert_close(moments.total, QUERIES[:, 4:].sum(1).double(), rtol=1e-5, atol=1e-5)


def test_sums_of_some_queries_of_a_span_leave_out_the_sinks() -> None:
    buffer = buffer_of("expected_attention", sinks=4)
    rows = torch.tensor([1, 3, 4, 9])
    buffer.remember(0, QUERIES[:, rows], rows.int(), (1, 10), None)
    moments = buffer.moments(0)
    assert moments is not None
    torch.testing.assert_close(moments.total, QUERIES[:, [4, 9]].sum(1).double(), rtol=1e-5, atol=1e-5)
