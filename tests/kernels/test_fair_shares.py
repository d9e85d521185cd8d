"""Spans of which some entries stay, in a decoding step: the C++ kernels against the reference."""

from __future__ import annotations

import pytest
import torch

from millpond.errors import OptionError
from millpond.kernels import native, reference
from millpond.kernels.decode_rules import MOST_LEAST, Evict, in_full_spans
from millpond.kernels.native import library
from tests.kernels.test_kept_spans import full_call

needs_native = pytest.mark.skipif(not library.runnable(), reason="installed without native kernels")
LAST = 2**31 - 1
#: Spans and fewest entries, of texts of 83 tokens of which heads hold 40.
LEAST = [
    [(0, 30, 30), (30, 83, 1), (LAST, LAST, 0)],
    [(0, 60, 0), (60, 70, 10), (LAST, LAST, 0)],
    [(0, 20, 3), (20, 40, 20), (40, 83, 43)],
]


@needs_native
@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("evict", [evict for evict in Evict if evict is not Evict.NEVER])
def test_a_span_that_holds_no_more_than_it_must_loses_nothing(evict: Evict, shared: bool) -> None:
    call = full_call(evict, shared)
    call.kept, call.least = None, torch.tensor(LEAST, dtype=torch.int32)
    other, free = call.clone(), call.clone()
    free.least = None
    (out, lse, evicted), found = call.run(reference), other.run(native)
    torch.testing.assert_close(found.out, out)
    torch.testing.assert_close(found.lse, lse)
    assert torch.equal(found.evicted, evicted)
    assert torch.equal(call.contents()[2], other.contents()[2])
    left = evicted.view(3, 2)
    assert ((left[0] >= 30) & (left[0] < 83)).all()
    assert not ((left[1] >= 60) & (left[1] < 70)).any()
    assert (left[2] < 20).all()
    assert (free.run(native).evicted != evicted).any()


@needs_native
def test_others_have_the_same_bits() -> None:
    call = full_call(Evict.ACC)
    call.kept = None
    free = call.clone()
    call.least = torch.tensor([[(0, 83, 0)]] * 3, dtype=torch.int32)
    with_spans, without = call.run(native), free.run(native)
    assert torch.equal(with_spans.out, without.out)
    assert torch.equal(with_spans.evicted, without.evicted)


@needs_native
@pytest.mark.parametrize("shape", [(2, 1, 3), (3, MOST_LEAST + 1, 3)])
def test_spans_of_another_batch_and_too_many_are_refused(shape: tuple[int, int, int]) -> None:
    call = full_call(Evict.ACC)
    call.least = torch.zeros(shape, dtype=torch.int32)
    with pytest.raises(OptionError, match="fewest entries"):
        call.run(native)


def test_positions_in_full_spans() -> None:
    positions = torch.tensor([[0, 4, 5, -1], [8, 9, 10, 2]])
    least = torch.tensor([[[0, 5, 2], [5, 6, 0]], [[0, 3, 4], [8, 11, 2]]])
    assert in_full_spans(positions, least).tolist() == [[True, True, False, False], [False, False, False, True]]
