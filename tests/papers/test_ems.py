"""EMS, as reconstructed, by hand: the score, which entries matter, classes and the class of zero, centres."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from millpond.errors import OptionError
from millpond.kernels.merge.reference import MergeColumns, middle
from millpond.methods import METHODS
from millpond.methods.ems import MergeByImportance
from millpond.policy.merging import Merged
from millpond.policy.scores.attention import GlobalAndLocal
from millpond.policy.view import View
from tests.helpers.papers.fixture import COLUMN_SUMS, LOGITS, ROWS, N, feed, kept, make_layer_cache
from tests.helpers.papers.keyed import run, sets, text, view

ems = METHODS.get("ems")
BEST = [2.832348, 1.631960, 0.887847, 1.497128, 0.550762, 0.811732]


def fixture() -> View:
    local = torch.tensor([[sum(row[j] if j < len(row) else 0.0 for row in ROWS[-2:]) for j in range(N)]])
    return replace(view(torch.ones(1, N, 1), signal=torch.tensor([COLUMN_SUMS])), recent_attention=lambda: local)


def test_score_of_the_fixture() -> None:
    """Local scores are aligned by n / w = 3."""
    assert GlobalAndLocal(window=2).score(fixture(), 0)[0].tolist() == pytest.approx(BEST, abs=1e-5)
    pooled = GlobalAndLocal(window=2, kernel=3).score(fixture(), 0)[0].tolist()
    assert pooled == pytest.approx([max(BEST[max(0, j - 1) : j + 2]) for j in range(N)], abs=1e-5)


def test_the_cache_hands_over_both_signals() -> None:
    """Budget 4 of 6: the window, and the best of the others by the score above."""
    cache = make_layer_cache(ems(window=2, threshold=1.5), budget=4)
    feed(cache, LOGITS[None], 0, N)
    assert kept(cache) == [0, 1, 4, 5]
    assert cache.read(0).scores[0].tolist() == pytest.approx([COLUMN_SUMS[j] for j in (0, 1, 4, 5)], abs=1e-5)


def merged(keys: Tensor, values: Tensor, score: list[float], kept_: int, **settings: float) -> Merged:
    look = view(keys, values, signal=torch.tensor([score]))
    keep = torch.arange(keys.shape[1])[None] < kept_
    into = MergeByImportance(**settings)  # type: ignore[arg-type]
    return into.merge(look, keep, torch.tensor([score]), 0)


KEYS = torch.tensor([[[2.0, 0.0], [0.0, 1.0], [4.0, 3.0], [-3.0, 0.0]]], dtype=torch.float64)
VALUES = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [0.0, 5.0], [-2.0, 0.0]]], dtype=torch.float64)
EVEN = {"cover": 1.0, "most": 9.0}


def test_a_class_by_hand() -> None:
    """Entry 2: R with 0 is .8 * 0, so -1; with 1 it is .6 * 1. Weights 3 : 1, direction and length by themselves."""
    found = merged(KEYS, VALUES, [4.0, 3.0, 1.0, 0.5], 2, threshold=0.5, **EVEN)
    assert found.values[0, :2].flatten().tolist() == pytest.approx([1, 0, 0, 0.75 * 1 + 0.25 * 5])
    direction = torch.tensor([0.25 * 0.8, 0.75 + 0.25 * 0.6], dtype=torch.float64)
    expected = direction / direction.norm() * (0.75 * 1 + 0.25 * 5)
    assert torch.allclose(found.keys[0, 1], expected, atol=1e-12)
    assert torch.equal(found.keys[0, 0], KEYS[0, 0])
    assert found.scores[0, :2].tolist() == [4, 4]
    assert found.log_masses[0, :2].exp().tolist() == pytest.approx([1, 2])


def test_two_negative_cosines_are_no_likeness() -> None:
    """Entry 3 is the opposite of 0 in key and value: their product is 1, and it goes to zero all the same."""
    found = merged(KEYS, VALUES, [4.0, 3.0, 1.0, 0.5], 2, threshold=0.0, **EVEN)
    assert found.scores[0, 0] == 4
    assert torch.equal(found.values[0, 0], VALUES[0, 0])


def test_above_one_nothing_is_merged() -> None:
    found = merged(KEYS, VALUES, [4.0, 3.0, 1.0, 0.5], 2, threshold=1.01, **EVEN)
    assert torch.equal(found.values, VALUES)
    assert torch.equal(found.keys, KEYS)


def test_twins_become_one() -> None:
    keys, values = KEYS[:, [0, 1, 0, 0]], VALUES[:, [0, 1, 0, 0]]
    found = merged(keys, values, [4.0, 3.0, 1.0, 0.5], 2, **EVEN)
    assert torch.allclose(found.keys[0, :2], keys[0, :2], atol=1e-12)
    assert torch.allclose(found.values[0, :2], values[0, :2], atol=1e-12)
    assert found.log_masses[0, :2].exp().tolist() == pytest.approx([3, 1])


@pytest.mark.parametrize(
    ("cover", "most", "expected"),
    [(1.0, 9.0, 6), (0.95, 9.0, 4), (0.9, 9.0, 3), (0.7, 9.0, 0), (1.0, 1.0, 2), (1.0, 0.5, 1), (1.0, 0.0, 0)],
)
def test_which_entries_matter(cover: float, most: float, expected: int) -> None:
    """Of 100 the first n hold 40, 70, 80, 86, 91, 95, 98 and 100; two are kept."""
    score = torch.tensor([[40.0, 30, 10, 6, 5, 4, 3, 2]])
    keep = torch.arange(8)[None] < 2
    rows, masses = torch.ones(1, 8, 1), torch.ones(1, 8, dtype=torch.float64)
    entries = MergeColumns(rows, rows, torch.arange(8, dtype=torch.int32)[None], score, masses)
    found = middle(MergeByImportance(cover=cover, most=most).rule, entries, keep, score)
    assert found[0].tolist() == [2 <= j < 2 + expected for j in range(8)]


def test_heads_of_any_length_go_alone() -> None:
    """Padded columns and other heads change nothing, and neither does the order of heads."""
    make = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 1, 12, 4, generator=make, dtype=torch.float64)
    score = torch.rand(1, 12, generator=make)
    keep = (torch.arange(12) % 3 == 0)[None]
    into = MergeByImportance(threshold=0.1, cover=1.0)
    alone = into.merge(view(keys, values, signal=score), keep, score, 0)
    other = torch.randn(1, 20, 4, generator=make, dtype=torch.float64)
    pad = torch.nn.functional.pad
    positions = torch.stack([torch.arange(20), torch.cat([torch.arange(12), torch.full((8,), -1)])]).int()
    for order in ([0, 1], [1, 0]):
        look = view(
            torch.cat([other, pad(keys, (0, 0, 0, 8))])[order],
            torch.cat([other, pad(values, (0, 0, 0, 8))])[order],
            positions[order],
            signal=torch.cat([torch.ones(1, 20), pad(score, (0, 8))])[order],
        )
        assert look.signal is not None
        keeps = torch.cat([torch.arange(20)[None] < 5, pad(keep, (0, 8))])[order]
        both = into.merge(look, keeps, look.signal, 0)
        assert torch.allclose(both.values[order.index(1), :12], alone.values[0], atol=1e-12)
        assert torch.allclose(both.keys[order.index(1), :12], alone.keys[0], atol=1e-12)
        assert torch.equal(both.scores[order.index(1), :12], alone.scores[0])


def test_scores_are_carried_along() -> None:
    """Nothing leaves by likeness alone: with everything alike enough the attention of all queries is still there."""
    q, k, v = text(heads=2, n=30)
    cache = run(ems(window=4, threshold=-1.0, cover=1.0, most=9.0, every=1), 12, q, k + 3, v + 3, prompt=24)
    assert sets(cache)[0][-4:] == [26, 27, 28, 29]
    assert [len(row) for row in sets(cache)] == [12, 12]
    assert cache.read(0).scores.sum(1).tolist() == pytest.approx([30, 30], rel=1e-4)


@pytest.mark.parametrize(
    ("options", "text_"),
    [
        ({"kernel": 4}, "kernel=4 must be odd"),
        ({"window": 0}, "window=0 must be 1 to 1,024"),
        ({"cover": 1.5}, "cover=1.5 must be 0 to 1"),
        ({"most": -1.0}, "most=-1.0 must be 0 to 1,000,000"),
        ({"threshold": -2.0}, "threshold=-2.0 must be -1 to 10"),
        ({"decode": "grow", "every": 2}, "nothing is merged while decoding"),
    ],
)
def test_options_out_of_range(options: dict[str, object], text_: str) -> None:
    with pytest.raises(OptionError, match=text_):
        ems(**options)
