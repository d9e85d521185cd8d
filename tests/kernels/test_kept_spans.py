"""Spans that never leave, in a decoding step: the C++ kernels against the reference, for every order of eviction."""

from __future__ import annotations

import pytest
import torch

from millpond.errors import OptionError
from millpond.kernels import native, reference
from millpond.kernels.decode_rules import DecodeRule, Evict, Signal, in_spans
from millpond.kernels.native import library
from tests.helpers.kernels.make import Call, Case

needs_native = pytest.mark.skipif(not library.runnable(), reason="installed without native kernels")
#: Of the second of three sequences, whose text has 83 tokens; the first has one, the third none.
SPANS = [[(5, 9), (0, 0)], [(0, 60), (70, 80)], [(0, 0), (0, 0)]]


def full_call(evict: Evict, shared: bool = False, lens: int = 40) -> Call:
    """Three sequences of two full heads."""
    rule = DecodeRule(Signal.SUM, evict=evict, sinks=2, shared=shared, seed=3)
    n = 6
    call = Case(
        [lens] * n,
        3,
        2,
        2,
        16,
        16,
        8,
        torch.float32,
        8,
        [lens] * n,
        [3] * n,
        set(),
        rule,
        0.0,
        0,
        False,
        shared,
        seed=4,
    ).build()
    call.kept = torch.tensor(SPANS, dtype=torch.int32)
    return call


@needs_native
@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("evict", [evict for evict in Evict if evict is not Evict.NEVER])
def test_what_leaves_lies_in_no_span(evict: Evict, shared: bool) -> None:
    call = full_call(evict, shared)
    other, free = call.clone(), call.clone()
    free.kept = None
    (out, lse, evicted), found = call.run(reference), other.run(native)
    torch.testing.assert_close(found.out, out)
    torch.testing.assert_close(found.lse, lse)
    assert torch.equal(found.evicted, evicted)
    assert torch.equal(call.contents()[2], other.contents()[2])
    left = evicted.view(3, 2, 1)
    inside = torch.stack([in_spans(own, spans.expand(2, -1, -1)) for own, spans in zip(left, call.kept, strict=True)])
    assert not inside.any()
    assert torch.equal(free.run(native).evicted[4:], evicted[4:])  # what keeps none is as without


@needs_native
def test_others_have_the_same_bits() -> None:
    call = full_call(Evict.ACC)
    free = call.clone()
    free.kept = None
    with_spans, without = call.run(native), free.run(native)
    assert torch.equal(with_spans.out, without.out)
    assert (with_spans.evicted[:4] != without.evicted[:4]).any()


@needs_native
def test_spans_of_another_batch_are_refused() -> None:
    call = full_call(Evict.ACC)
    assert call.kept is not None
    call.kept = call.kept[:2]
    with pytest.raises(OptionError, match="kept spans"):
        call.run(native)


def test_positions_in_spans() -> None:
    positions = torch.tensor([[0, 4, 5, -1], [8, 9, 10, 2]])
    spans = torch.tensor([[[4, 5], [0, 0]], [[0, 3], [9, 11]]])
    assert in_spans(positions, spans).tolist() == [[False, True, False, False], [False, True, True, True]]
