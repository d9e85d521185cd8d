"""H2O by hand: one-shot, greedy, averaged, the window, sinks and float32 sums."""

from itertools import pairwise

import pytest
import torch

from millpond.errors import BudgetError, OptionError
from millpond.kernels import ops
from millpond.kernels.decode_rules import DecodeRule, Evict, Signal
from millpond.kernels.pages import PageArrays
from millpond.methods import METHODS
from millpond.policy.view import View
from tests.helpers.kernels.args import decode_args
from tests.helpers.papers.fixture import COLUMN_SUMS, LOGITS, ROWS, N, feed, kept, make_layer_cache, run

h2o = METHODS.get("h2o")


def test_one_shot_keeps_two_heavy_and_two_recent() -> None:
    assert run(h2o(recent=2, sinks=0), budget=4) == [0, 1, 4, 5]


def test_greedy_differs_from_one_shot() -> None:
    """Algorithm 2 with the window: attention is renormalised over the kept set at every step."""
    cache = make_layer_cache(h2o(recent=2, sinks=0), budget=4)
    seen = []
    feed(cache, LOGITS[None], 0, 1)
    seen.append(kept(cache))
    for t in range(1, N):
        feed(cache, LOGITS[None], t, t + 1)
        seen.append(kept(cache))
    assert seen == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 2, 3, 4], [0, 2, 4, 5]]


def test_greedy_prefill_is_the_same_as_decoding() -> None:
    assert run(h2o(recent=2, sinks=0, prefill="greedy"), budget=4) == [0, 2, 4, 5]


def test_average_divides_by_the_queries_that_saw_the_entry() -> None:
    """ObservedAttention's numbers: the sum over the number of rows below."""
    view = View(torch.arange(N, dtype=torch.int32)[None], torch.tensor([COLUMN_SUMS]), seen=N, layer=0)
    policy = h2o(average=True)
    assert policy.score is not None
    expected = [0.472058, 0.221344, 0.221962, 0.239641, 0.091794, 0.270577]
    assert torch.allclose(policy.score.score(view, 0)[0], torch.tensor(expected), atol=1e-5)


def test_decay_makes_old_attention_count_less() -> None:
    """A2SF: s_j = sum_i decay**(n - i) A_ij, whether the tokens come as one prompt, in pieces or one by one."""
    expected = [sum(0.5 ** (N - 1 - i) * row[j] for i, row in enumerate(ROWS) if j < len(row)) for j in range(N)]
    for cuts in ([0, N], [0, 2, N], range(N + 1)):
        cache = make_layer_cache(h2o(decay=0.5), budget=N)
        for begin, end in pairwise(cuts):
            feed(cache, LOGITS[None], begin, end)
        found = cache.read(0)
        by_position = dict(zip(found.positions[0].tolist(), found.scores[0].tolist(), strict=True))
        assert [by_position[j] for j in range(N)] == pytest.approx(expected, abs=1e-5)
    assert run(h2o(recent=0, sinks=0), budget=3) == [0, 1, 2]
    assert run(h2o(recent=0, sinks=0, decay=0.2), budget=3) == [1, 2, 5]


def test_decay_is_refused_where_it_means_nothing() -> None:
    for decay in (0.0, -0.5, 1.01):
        with pytest.raises(OptionError, match=r"decay=.* must be above 0 and at most 1"):
            h2o(decay=decay)
    with pytest.raises(OptionError, match=r"average=true weighs all queries alike and decay=0.9 does not"):
        h2o(average=True, decay=0.9)


@pytest.mark.parametrize("name", ["ada", "chunkkv", "dms", "layer_table", "merge_on_evict", "pyramidkv"])
def test_methods_over_a_score_that_forgets_forget_too(name: str) -> None:
    assert METHODS.get(name)(score="h2o/decay=0.9").decay == 0.9


@pytest.mark.parametrize(("recent", "expected"), [(0, [0, 1, 2, 3]), (4, [2, 3, 4, 5]), (1, [0, 1, 2, 5])])
def test_no_window_and_all_window_are_legal(recent: int, expected: list[int]) -> None:
    assert run(h2o(recent=recent, sinks=0), budget=4) == expected


def test_sinks_stay_though_nobody_looks_at_them() -> None:
    logits = LOGITS.clone()
    logits[:, 0] = -20.0
    logits[0, 0] = 0.0
    for sinks, has_first in ((0, False), (1, True)):
        cache = make_layer_cache(h2o(recent=2, sinks=sinks), budget=3 + sinks)
        feed(cache, logits[None], 0, 1)
        for t in range(1, N):
            feed(cache, logits[None], t, t + 1)
        assert (0 in kept(cache)) is has_first


def test_grace_protects_a_new_entry_for_some_steps() -> None:
    policy = h2o(recent=0, sinks=0, grace=3)
    assert policy.decode_rule(0).evict is Evict.ACC
    cache = make_layer_cache(policy, budget=4)
    feed(cache, LOGITS[None], 0, 1)
    for t in range(1, N):
        feed(cache, LOGITS[None], t, t + 1)
        assert set(range(max(0, t - 2), t + 1)) <= set(kept(cache))


def test_protection_that_does_not_fit_is_refused() -> None:
    with pytest.raises(BudgetError, match=r"budget 8 is smaller than sinks 4 \+ recent 8; raise budget"):
        run(h2o(recent=8, sinks=4), budget=8)


def test_the_newest_entry_is_always_visible_to_itself() -> None:
    """Defect H4 and E2: with recent = 0 the token that is being read still attends to itself."""
    cache = make_layer_cache(h2o(recent=0, sinks=0), budget=1)
    feed(cache, LOGITS[None], 0, 1)
    out = feed(cache, LOGITS[None], 1, 2)
    assert float(out[0, 0, 0, 1]) == pytest.approx(0.268941, abs=1e-6)


def test_no_resurrection() -> None:
    """Defect H3: what was evicted never comes back, over many random steps."""
    torch.manual_seed(0)
    logits = torch.randn(2, 60, 60, dtype=torch.float64) * 3
    cache = make_layer_cache(h2o(recent=3, sinks=1), budget=8)
    feed(cache, logits, 0, 10)
    before = [set(kept(cache, h)) for h in range(2)]
    for t in range(10, 60):
        feed(cache, logits, t, t + 1)
        for h in range(2):
            now = set(kept(cache, h))
            assert now <= before[h] | {t}
            assert len(now) == 8
            assert t in now
            before[h] = now


def test_no_future_leaks_into_the_selection() -> None:
    """Defect H9: changing a later token cannot change what was kept before it."""
    torch.manual_seed(1)
    logits = torch.randn(1, 30, 30, dtype=torch.float64) * 3
    other = logits.clone()
    other[:, 20:] = torch.randn(1, 10, 30, dtype=torch.float64)
    sets = []
    for text in (logits, other):
        cache = make_layer_cache(h2o(recent=3, sinks=1), budget=6)
        feed(cache, text, 0, 12)
        for t in range(12, 20):
            feed(cache, text, t, t + 1)
        sets.append(kept(cache))
    assert sets[0] == sets[1]


def test_scores_keep_growing_in_float32() -> None:
    """Defect H7: in half precision 2048 + 0.9 = 2048. A total of a million steps still grows and keeps its order."""
    pages = PageArrays(1, 4, 1, 1, torch.float32, torch.device("cpu"))
    pages.add_arena()
    pages.positions[0][0] = torch.arange(4, dtype=torch.int32)
    pages.keys[0].zero_()
    pages.values[0].zero_()
    before = torch.tensor([500_000.0, 499_900.0])  # a million queries at 0.5 and at 0.4999
    pages.scores[0][0, :2] = before
    zero, one = torch.zeros(1, 1, 1), torch.ones(1, dtype=torch.int32)
    table = torch.zeros(1, 1, dtype=torch.int32)
    for t in range(3000):
        ops.decode(
            decode_args(
                zero,
                zero,
                zero,
                pages,
                table,
                one * 2,
                one * 2,
                one * 0,
                one * (1_000_000 + t),
                DecodeRule(Signal.SUM, evict=Evict.NEVER),
                scale=1.0,
            )
        )
    grown = pages.scores[0][0, :2] - before
    assert torch.allclose(grown, torch.full((2,), 1000.0), rtol=0.05)  # a third each time, rounded to 1/32
    assert pages.scores[0][0, 0] > pages.scores[0][0, 1]
