"""H2O's own ablations, each a real cache: heavy only, recent only, both; without heavy hitters; sparse patterns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import millpond as mp
from millpond.errors import BudgetError, OptionError
from millpond.methods import METHODS
from millpond.policy.policy import Policy
from tests.helpers.matrix.hidden import passes, steps_after
from tests.helpers.matrix.models import llama, prompts
from tests.helpers.matrix.oracle import Oracle, Rule
from tests.helpers.papers.fixture import feed, kept, make_layer_cache, run

STEPS = 60


def build(name: str, **options: Any) -> Policy:
    return METHODS.get(name)(**options)


def logits(heads: int = 2, n: int = STEPS, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(heads, n, n, generator=generator, dtype=torch.float64) * 3


def sets(policy: Policy, budget: int, text: Tensor, prompt: int = 20) -> list[list[list[int]]]:
    """Kept positions [moment][head], after a prompt and after each step behind it."""
    cache = make_layer_cache(policy, budget)
    found = []
    for first, last in [(0, prompt), *((t, t + 1) for t in range(prompt, text.shape[-1]))]:
        feed(cache, text, first, last)
        found.append([kept(cache, h) for h in range(len(text))])
    return found


# ------------------------------------------------------------------ heavy only, recent only, both


@pytest.mark.parametrize("budget", [1, 2, 7, 20])
def test_recent_only_is_the_window(budget: int) -> None:
    text = logits()
    assert sets(build("h2o", recent=1.0, sinks=0), budget, text) == sets(build("window"), budget, text)


def test_recent_only_beside_sinks_is_the_window_with_sinks() -> None:
    text = logits()
    assert sets(build("h2o", recent=1.0, sinks=3), 9, text) == sets(build("window", sinks=3), 9, text)


@pytest.mark.parametrize(("budget", "expected"), [(1, [0]), (4, [0, 1, 2, 3]), (5, [0, 1, 2, 3, 5]), (6, [*range(6)])])
def test_heavy_only_is_the_top_of_the_column_sums(budget: int, expected: list[int]) -> None:
    """The column sums of fixture F6 fall with the position, but for the last two: 0.18, 0.27."""
    assert run(build("h2o", recent=0, sinks=0), budget) == expected


def follow(
    cache: Any, text: torch.Tensor, held: dict[int, float], leaves: Callable[[dict[int, float], int], int]
) -> None:
    """From step 20 on the cache holds what plain sums of attention say, less the entry that `leaves` names."""
    for t in range(20, STEPS):
        assert set(kept(cache)) == set(held)
        feed(cache, text, t, t + 1)
        places = [*sorted(held), t]
        row = torch.softmax(text[0, t, places], 0).tolist()
        held = {j: held.get(j, 0.0) + p for j, p in zip(places, row, strict=True)}
        held.pop(leaves(held, t))


def test_heavy_only_keeps_the_heaviest_at_each_step() -> None:
    """No entry is protected; the lowest sum leaves, the new one too (it attends to itself)."""
    text, budget = logits(1), 8
    cache = make_layer_cache(build("h2o", recent=0, sinks=0), budget)
    feed(cache, text, 0, 20)
    sums = torch.softmax(text[0].masked_fill(torch.ones(STEPS, STEPS).triu(1).bool(), float("-inf")), 1)[:20].sum(0)
    held = {int(j): float(sums[j]) for j in sums[:20].topk(budget).indices}
    follow(cache, text, held, lambda held, t: min(held, key=lambda j: held[j]))


def test_without_grace_heavy_only_freezes_and_with_it_it_does_not() -> None:
    """Old entries have gathered so much that no new one ever stays, unless it has time to gather."""
    text = torch.zeros(1, STEPS, STEPS, dtype=torch.float64)
    text[:, :, 25] = 5.0  # from position 25 on everybody looks at it
    text[:, 25, 25] = 0.0  # but not yet when it is new
    frozen = sets(build("h2o", recent=0, sinks=0), 8, text)
    moving = sets(build("h2o", recent=0, sinks=0, grace=2), 8, text)
    assert 25 not in frozen[-1][0]
    assert max(frozen[-1][0]) < 20
    assert 25 in moving[-1][0]


def test_both_keep_the_last_and_the_heaviest_of_the_others() -> None:
    text, budget = logits(1), 10
    cache = make_layer_cache(build("h2o", recent=0.5, sinks=0), budget)
    feed(cache, text, 0, 20)
    sums = torch.softmax(text[0].masked_fill(torch.ones(STEPS, STEPS).triu(1).bool(), float("-inf")), 1)[:20].sum(0)
    assert set(kept(cache)) == {*range(15, 20), *sums[:15].topk(5).indices.tolist()}


@pytest.mark.parametrize("options", [{"recent": 0}, {"recent": 0, "grace": 1}, {"recent": 0.0}, {"recent": 1.0}])
@pytest.mark.parametrize("budget", [1, 2, 5])
def test_smallest_budgets_are_held_and_the_newest_sees_itself(options: dict[str, Any], budget: int) -> None:
    text = logits(2, 30)
    cache = make_layer_cache(build("h2o", sinks=0, **options), budget)
    feed(cache, text, 0, 10)
    for t in range(10, 30):
        out = feed(cache, text, t, t + 1)
        assert (out[0, :, 0, t] > 0).all()
        assert cache.stored.tolist() == [[budget, budget]]


def test_protection_that_cannot_fit_is_refused() -> None:
    with pytest.raises(BudgetError, match=r"budget 1 is smaller than sinks 0 \+ recent 2"):
        run(build("h2o", recent=0, sinks=0, grace=2), 1)


ABLATIONS: dict[str, tuple[dict[str, Any], Rule]] = {
    "heavy_only": ({"recent": 0, "sinks": 0}, Rule("sum", 10)),
    "heavy_only_with_grace": ({"recent": 0, "sinks": 0, "grace": 2}, Rule("sum", 10, recent=2)),
    "recent_only": ({"recent": 1.0, "sinks": 0}, Rule("newest", 10)),
    "both": ({"recent": 0.5, "sinks": 0}, Rule("sum", 10, recent=0.5)),
    "one_entry": ({"recent": 0, "sinks": 0}, Rule("sum", 1)),
}


@pytest.mark.parametrize("case", ABLATIONS)
def test_ablations_drop_what_a_mask_would_hide(case: str) -> None:
    """Real caches against a full one with masked entries: logits to 1e-12, the same sets, ragged batch, GQA."""

    options, rule = ABLATIONS[case]
    model, (ids, mask) = llama("gqa"), prompts(2)
    oracle = Oracle(rule)
    with torch.no_grad(), mp.compress(model, "h2o", rule.budget, page_slots=4, **options) as cache:
        for error, _ in passes(model, cache, oracle, steps_after(ids, 12), mask):
            assert error <= 1e-12
        for (layer, b, h), head in oracle.heads.items():
            assert cache.positions(layer, b)[h] == head.kept


# ------------------------------------------------------------------ without heavy hitters


def test_no_heavy_evicts_what_h2o_keeps() -> None:
    assert run(build("no_heavy", recent=0), 2) == [4, 5]
    assert run(build("no_heavy", recent=0), 4) == [2, 3, 4, 5]
    assert run(build("no_heavy", recent=0), 5) == [1, 2, 3, 4, 5]
    assert run(build("no_heavy", recent=1), 5) == [1, 2, 3, 4, 5]


def test_no_heavy_goes_on_evicting_the_heaviest() -> None:
    text, budget = logits(1), 8
    cache = make_layer_cache(build("no_heavy", recent=2), budget)
    feed(cache, text, 0, 20)
    sums = torch.softmax(text[0].masked_fill(torch.ones(STEPS, STEPS).triu(1).bool(), float("-inf")), 1)[:20].sum(0)
    held = {int(j): float(sums[j]) for j in [*(-sums[:18]).topk(6).indices, 18, 19]}
    follow(cache, text, held, lambda held, t: max((j for j in held if j < t - 1), key=lambda j: held[j]))


# ------------------------------------------------------------------ sparse patterns


def test_strided_by_hand() -> None:
    """17 positions: 4 newest, then multiples of 8 (0, 8), then of 4 (4, 12); the next are odd multiples of 2."""
    text = logits(1, 17)
    for budget, others in ((6, [0, 8]), (8, [0, 4, 8, 12]), (9, [0, 4, 8, 10, 12]), (7, [0, 8, 12])):
        cache = make_layer_cache(build("strided", recent=4), budget)
        feed(cache, text, 0, 17)
        assert kept(cache) == [*others, 13, 14, 15, 16]


@pytest.mark.parametrize(
    ("budget", "expected"),
    [(3, [10, 15, 16]), (4, [5, 10, 15, 16]), (5, [0, 5, 10, 15, 16]), (6, [0, 5, 10, 14, 15, 16])],
)
def test_strided_with_a_stride_of_its_own(budget: int, expected: list[int]) -> None:
    """Multiples of 5; what does not fit leaves oldest first, what is left over goes to the newest."""
    cache = make_layer_cache(build("strided", stride=5, recent=1), budget)
    feed(cache, logits(1, 17), 0, 17)
    assert kept(cache) == expected


def test_fixed_by_hand() -> None:
    """Blocks of 8: the last two of each, and the newest three."""
    found = sets(build("fixed", width=2, block=8, recent=3), 7, logits(1, 32))
    assert found[0] == [[6, 7, 14, 15, 17, 18, 19]]
    assert found[4] == [[6, 7, 14, 15, 21, 22, 23]]
    assert found[-1] == [[14, 15, 22, 23, 29, 30, 31]]


def test_fixed_as_the_budget_asks() -> None:
    """Units of two: 7 (14, 15), 3 (6, 7) and 11 (22, 23) are the ends of blocks of 8 positions."""
    cache = make_layer_cache(build("fixed", width=2, recent=2), 8)
    feed(cache, logits(1, 28), 0, 28)
    assert kept(cache) == [6, 7, 14, 15, 22, 23, 26, 27]


@pytest.mark.parametrize("name", ["strided", "fixed"])
def test_patterns_stay_whole_while_the_text_grows(name: str) -> None:
    """What a pattern over the whole text would hold is what is held: nothing was evicted too early."""
    text = logits(1, 50)
    for last, found in zip(range(20, 51), sets(build(name, recent=3), 9, text), strict=True):
        cache = make_layer_cache(build(name, recent=3), 9)
        feed(cache, text, 0, last)
        assert kept(cache) == found[0]


@pytest.mark.parametrize("name", ["strided", "fixed"])
def test_heavy_hitters_beside_a_pattern(name: str) -> None:
    """A quarter of 16 goes to the heaviest outside the newest, the rest of the unprotected half to the pattern."""
    text = logits(1, 40)
    cache = make_layer_cache(build(name, recent=0.5, heavy=0.25), 16)
    feed(cache, text, 0, 40)
    p = torch.softmax(text[0].masked_fill(torch.ones(40, 40).triu(1).bool(), float("-inf")), 1)
    heavy = set(p.sum(0)[:32].topk(4).indices.tolist())
    assert heavy | set(range(32, 40)) <= set(kept(cache))
    alone = make_layer_cache(build(name, recent=0.5), 16)
    feed(alone, text, 0, 40)
    assert len(set(kept(cache)) - set(kept(alone)) - heavy) == 0
    only = make_layer_cache(build(name, recent=0.5, heavy=0.5), 16)
    h2o = make_layer_cache(build("h2o", recent=0.5, sinks=0), 16)
    for c in (only, h2o):
        feed(c, text, 0, 40)
    assert kept(only) == kept(h2o)


def test_a_pattern_with_heavy_hitters_goes_on_gathering() -> None:
    """With all of the unprotected half for heavy hitters the pattern has no say: the cache is H2O's at each step."""
    text = logits()
    options = {"recent": 0.5, "sinks": 0}
    assert sets(build("strided", heavy=0.5, **options), 10, text) == sets(build("h2o", **options), 10, text)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("strided", {"stride": -1}, "stride=-1 must be 0 to 16,777,216"),
        ("strided", {"heavy": 0.6}, r"heavy=0.6 must lie in 0..0.5, what recent=0.5 leaves"),
        ("fixed", {"heavy": -0.1}, r"heavy=-0.1 must be 0 to 1"),
        ("fixed", {"width": 3, "block": 8}, "block=8 must be a multiple of width=3"),
        ("fixed", {"width": 0}, "width=0 must be 1 to 16,777,216"),
        ("no_heavy", {"sinks": -1}, "sinks=-1 must be 0 to 16,777,216"),
    ],
)
def test_options_out_of_range(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        build(name, **options)


def test_averaged_scores_have_no_head_start() -> None:
    """By count fixture F6 reads .472, .221, .222, .240, .092, .271: position 1 loses its place to 5."""
    assert run(build("h2o", recent=0, sinks=0, average=True), 4) == [0, 2, 3, 5]
