"""The reference worked by hand: small numbers, every rule once."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from millpond.kernels import ops, reference
from millpond.kernels.args import PageRegions
from millpond.kernels.decode_rules import DecodeRule, Evict, Reduce, Signal, Spacing
from millpond.kernels.eager.softmax import lse_merge
from millpond.kernels.pages import PageArrays
from tests.helpers.kernels.args import prefill_args, window_args, write_args
from tests.helpers.kernels.make import Call, Case

LN2 = math.log(2.0)


def tiny(positions: list[int], scores: list[float], rule: DecodeRule, cap: int, q_pos: int, **more: object) -> Call:
    """One region whose keys are all zero, so that all entries get the same attention."""
    n = len(positions)
    fields: dict[str, object] = {"caps": [cap], "rule": rule, "key_dim": 1, "value_dim": 1, **more}
    call = Case([n], **fields).build()  # type: ignore[arg-type]
    call.keys.zero_()
    call.k_new.zero_()
    call.values[0, :, 0] = torch.arange(1.0, n + 1)
    call.v_new.fill_(float(n + 1))
    call.positions[0] = torch.tensor(positions)
    call.scores[0] = torch.tensor(scores)
    call.q.fill_(1.0)
    call.q_pos.fill_(q_pos)
    call._fill(reference)
    return call


def stored(call: Call) -> dict[int, float]:
    """Position to score of what the region holds."""
    _, _, positions, scores = call.contents()
    return dict(zip(positions[0].tolist(), [round(s, 5) for s in scores[0].tolist()], strict=True))


def test_equal_logits_average_the_values() -> None:
    call = tiny([0, 1, 2], [0, 0, 0], DecodeRule(), 99, 3)
    out, lse, evicted = call.run(reference)
    assert out.item() == pytest.approx((1 + 2 + 3 + 4) / 4)
    assert lse.item() == pytest.approx(math.log(4))
    assert evicted.tolist() == [-1]
    assert call.lens.tolist() == [4]
    assert list(stored(call)) == [0, 1, 2, 3]


def test_sum_adds_each_probability_and_decays() -> None:
    call = tiny([0, 1, 2], [1.0, 2.0, 0.0], DecodeRule(Signal.SUM, decay=0.5), 99, 3)
    call.run(reference)
    assert stored(call) == {0: 0.75, 1: 1.25, 2: 0.25, 3: 0.25}


def test_last_forgets_what_was() -> None:
    call = tiny([0, 1, 2], [1.0, 2.0, 0.0], DecodeRule(Signal.LAST), 99, 3)
    call.run(reference)
    assert stored(call) == {0: 0.25, 1: 0.25, 2: 0.25, 3: 0.25}


def test_no_signal_leaves_the_scores_alone() -> None:
    call = tiny([0, 1], [1.0, 2.0], DecodeRule(), 99, 2)
    call.run(reference)
    assert stored(call) == {0: 1.0, 1: 2.0, 2: 0.0}


@pytest.mark.parametrize(("how", "expected"), [(Reduce.MEAN, 0.5), (Reduce.MAX, 0.75), (Reduce.SUM, 1.0)])
def test_reduction_over_the_group(how: Reduce, expected: float) -> None:
    # head 0 sees logits (ln 3, 0): 3/4 and 1/4; head 1 sees (-ln 3, 0): 1/4 and 3/4
    call = tiny([0], [0.0], DecodeRule(Signal.SUM, how), 99, 1, group=2)
    call.keys.fill_(math.log(3.0))
    call._fill(reference)
    call.q = torch.tensor([[[1.0], [-1.0]]])
    call.run(reference)
    assert stored(call)[0] == pytest.approx(expected, abs=1e-5)


def test_the_lowest_score_leaves_and_its_slot_is_taken() -> None:
    call = tiny([0, 1, 2], [1.0, 0.1, 2.0], DecodeRule(Signal.SUM, evict=Evict.ACC), 3, 3, recent=[1])
    _, _, evicted = call.run(reference)
    assert evicted.tolist() == [1]
    assert call.lens.tolist() == [3]
    assert list(stored(call)) == [0, 3, 2]


def test_the_new_entry_may_be_the_one_that_leaves() -> None:
    call = tiny([0, 1, 2], [1.0, 1.0, 2.0], DecodeRule(Signal.SUM, evict=Evict.ACC), 3, 3)
    _, _, evicted = call.run(reference)
    assert evicted.tolist() == [3]
    assert list(stored(call)) == [0, 1, 2]


def test_ties_leave_oldest_first() -> None:
    call = tiny([7, 4, 5], [0.0, 0.0, 0.0], DecodeRule(Signal.LAST, evict=Evict.ACC), 3, 9)
    assert call.run(reference)[2].tolist() == [4]


def test_the_highest_score_leaves_where_the_rule_is_turned_round() -> None:
    call = tiny([0, 1, 2], [1.0, 0.1, 2.0], DecodeRule(Signal.SUM, evict=Evict.HEAVIEST), 3, 3, recent=[1])
    assert call.run(reference)[2].tolist() == [2]


@pytest.mark.parametrize(
    ("spacing", "positions", "gone"),
    [
        (Spacing(), [0, 4, 6, 8, 5], 5),  # worth 2**31, 4, 2, 8, 1
        (Spacing(), [0, 4, 6, 8, 12], 6),
        (Spacing(stride=4), [4, 8, 6, 2, 0], 2),  # 1, 1, 0, 0, 1: the older of two
        (Spacing(width=2, shift=1), [6, 7, 14, 10, 2], 2),  # units 4, 4, 8, 6, 2 are worth 4, 4, 8, 2, 2
        (Spacing(width=2, shift=1), [6, 7, 14, 15, 8], 8),  # unit 5
    ],
)
def test_a_pattern_of_positions(spacing: Spacing, positions: list[int], gone: int) -> None:
    call = tiny(positions, [0.0] * 5, DecodeRule(evict=Evict.SPACED, spacing=spacing), 5, 16, recent=[1])
    assert call.run(reference)[2].tolist() == [gone]


def test_mean_score_divides_by_the_queries_that_saw_the_entry() -> None:
    # at query 9: 3.75 + 0.25 over 10 queries = 0.4; 0.25 + 0.25 over 2 = 0.25; the new one 0.25 over 1
    rule = DecodeRule(Signal.SUM, evict=Evict.ACC_MEAN)
    call = tiny([0, 8, 9 - 4], [3.75, 0.25, 9.0], rule, 3, 9, recent=[1])
    assert call.run(reference)[2].tolist() == [8]


def test_sinks_and_recent_are_protected() -> None:
    rule = DecodeRule(evict=Evict.OLDEST, sinks=2)
    call = tiny([0, 1, 5, 8], [0.0] * 4, rule, 4, 9, recent=[2])
    assert call.run(reference)[2].tolist() == [5]
    call = tiny([0, 1, 8], [0.0] * 3, rule, 3, 9, recent=[2])  # all protected: the oldest
    assert call.run(reference)[2].tolist() == [0]


def test_window_hides_and_its_dead_leave_first() -> None:
    rule = DecodeRule(Signal.SUM, evict=Evict.ACC, sinks=4)
    call = tiny([0, 6, 7], [9.0, 0.0, 0.0], rule, 3, 8, window=3)
    out, _, evicted = call.run(reference)
    assert out.item() == pytest.approx((2 + 3 + 4) / 3)  # position 0 is hidden
    assert evicted.tolist() == [0]  # also from the next query, though it is a sink and scores highest


def test_softcap_and_sink_logit() -> None:
    call = tiny([0], [0.0], DecodeRule(), 99, 1, softcap=2.0)
    call.keys.fill_(3.0)
    call._fill(reference)
    call.sink_logits = torch.tensor([LN2])
    out, lse, _ = call.run(reference)
    first = math.exp(2.0 * math.tanh(3.0 / 2.0))
    total = first + 1.0 + 2.0
    assert lse.item() == pytest.approx(math.log(total), rel=1e-6)
    assert out.item() == pytest.approx((first * 1 + 1.0 * 2) / total, rel=1e-6)


def test_an_inactive_sequence_is_left_alone() -> None:
    call = tiny([0, 1], [0.5, 0.25], DecodeRule(Signal.SUM), 99, -1)
    before = stored(call)
    out, lse, evicted = call.run(reference)
    assert (out.item(), lse.item(), evicted.item()) == (0.0, -math.inf, -1)
    assert stored(call) == before


@pytest.mark.parametrize("evict", [e for e in Evict if e is not Evict.NEVER])
def test_shared_heads_drop_the_same_entry(evict: Evict) -> None:
    rule = DecodeRule(Signal.SUM, evict=evict, shared=True, seed=2**32 - 1)
    call = Case([6, 6, 6], 1, 3, caps=[6] * 3, rule=rule, same_slots=True).build()
    assert len(set(call.run(reference)[2].tolist())) == 1


def test_shared_value_is_the_mean_over_the_heads() -> None:
    rule = DecodeRule(evict=Evict.ACC, shared=True)
    call = Case([3, 3], 1, 2, caps=[3, 3], recent=[1, 1], rule=rule, same_slots=True).build()
    call.positions[:] = torch.tensor([0, 1, 2])
    call.scores[:] = torch.tensor([[0.0, 3.0, 5.0], [9.0, 2.0, 5.0]])  # means 4.5, 2.5, 5
    call._fill(reference)
    assert call.run(reference)[2].tolist() == [1, 1]


def test_random_eviction_does_not_depend_on_the_slots() -> None:
    rule = DecodeRule(evict=Evict.RANDOM, seed=5)
    one = tiny([3, 1, 2, 0], [0.0] * 4, rule, 4, 4).run(reference)[2]
    other = tiny([0, 1, 2, 3], [0.0] * 4, rule, 4, 4).run(reference)[2]
    assert torch.equal(one, other)


def test_write_then_read_places_chosen_rows() -> None:
    call = Case([0, 0], 2, 1, key_dim=2, value_dim=1, room=9).build()
    keys = torch.arange(12.0).view(2, 3, 2)
    values, positions = keys[..., :1] * 10, torch.tensor([[5, 6, 7]], dtype=torch.int32).expand(2, -1)
    index = torch.tensor([[2, 0], [1, 1]], dtype=torch.int32)
    start, count = torch.tensor([0, 7]).int(), torch.tensor([2, 1]).int()
    ops.write(*write_args(call.pages, call.table, start, count, index, keys, values, positions))
    dense = ops.read(PageRegions(call.pages, call.table, torch.tensor([2, 0]).int()), 3)
    assert dense.keys[0].tolist() == [[4.0, 5.0], [0.0, 1.0], [0.0, 0.0]]
    assert dense.values[0, :, 0].tolist() == [40.0, 0.0, 0.0]
    assert dense.positions.tolist() == [[7, 5, -1], [-1, -1, -1]]
    second = ops.read(PageRegions(call.pages, call.table, torch.tensor([0, 8]).int()), 8)
    assert second.keys[1, 7].tolist() == [8.0, 9.0]


def test_copy_pages() -> None:
    call = Case([8, 8], 2, 1, pages_per_arena=2).build()
    source, target = call.table[0, :1].numpy(), call.table[1, :1].numpy()
    call.pages.copy_pages(source, target)
    keys, values, positions, scores = call.contents()
    for x in (keys, values, positions, scores):
        assert torch.equal(x[0], x[1])


def test_copied_pages_are_read_before_one_is_written() -> None:
    """Pages of many arenas, in any order, some of which are copied over."""
    pages = PageArrays(2, 4, 3, 3, torch.float32, torch.device("cpu"))
    for _ in range(5):
        pages.add_arena()
        pages.keys[-1].normal_()
    before = torch.cat(pages.keys)
    source, target = np.array([7, 0, 3, 1], dtype=np.int32), np.array([0, 5, 7, 2], dtype=np.int32)
    pages.copy_pages(source, target)
    expected = before.clone()
    expected[target] = before[source]
    assert torch.equal(torch.cat(pages.keys), expected)


def test_prefill_by_hand() -> None:
    # two queries, equal logits: row 0 sees itself, row 1 both
    q, k = torch.ones(1, 2, 1), torch.zeros(1, 2, 1)
    v, pos = torch.tensor([[[2.0], [4.0]]]), torch.tensor([0, 1]).int()
    out, lse, sums = reference.prefill(prefill_args(q, k, v, pos, scale=1.0, colsum=Reduce.MEAN))
    assert out.flatten().tolist() == pytest.approx([2.0, 3.0])
    assert lse.flatten().tolist() == pytest.approx([0.0, LN2])
    assert sums is not None
    assert sums.flatten().tolist() == pytest.approx([1.5, 0.5])
    again = reference.window_signal(window_args(q, k, pos, pos[None], scale=1.0, lse=lse))
    assert again.flatten().tolist() == pytest.approx([1.5, 0.5])


def test_prefill_skips_ragged_holes_and_the_window() -> None:
    q, k = torch.ones(1, 1, 1), torch.zeros(1, 4, 1)
    v = torch.tensor([[[1.0], [2.0], [4.0], [8.0]]])
    past = torch.tensor([[0, -1, 8]]).int()
    out, _, _ = reference.prefill(prefill_args(q, k, v, torch.tensor([9]).int(), past, scale=1.0))
    assert out.item() == pytest.approx((1 + 4 + 8) / 3)
    out, _, _ = reference.prefill(prefill_args(q, k, v, torch.tensor([9]).int(), past, scale=1.0, window=5))
    assert out.item() == pytest.approx((4 + 8) / 2)


def test_merge_of_two_halves_is_the_whole() -> None:
    gen = torch.Generator().manual_seed(0)
    logits, values = torch.randn(3, 8, generator=gen), torch.randn(3, 8, 5, generator=gen)

    def part(columns: slice) -> tuple[Tensor, Tensor]:
        lse = torch.logsumexp(logits[:, columns], -1)
        p = torch.exp(logits[:, columns] - lse[:, None])
        return (p[..., None] * values[:, columns]).sum(1), lse

    out, lse = lse_merge(*part(slice(0, 3)), *part(slice(3, 8)))
    whole, whole_lse = part(slice(0, 8))
    torch.testing.assert_close(out, whole)
    torch.testing.assert_close(lse, whole_lse)


def test_merge_with_empty_sets() -> None:
    empty, nothing = torch.full((2,), -math.inf), torch.zeros(2, 3)
    some, lse = torch.ones(2, 3), torch.zeros(2)
    assert torch.equal(lse_merge(some, lse, nothing, empty)[0], some)
    out, both = lse_merge(nothing, empty, nothing, empty)
    assert torch.equal(out, nothing)
    assert torch.equal(both, empty)
