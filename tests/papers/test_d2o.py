"""D2O by hand: densities and layer shares, the moving threshold, convex weights, the official code's, no leaks."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from millpond.errors import OptionError
from millpond.kernels.merge.reference import follow
from millpond.methods import METHODS
from millpond.methods.d2o import AttentionDensity, MergeAboveThreshold
from millpond.policy.layer_allocation import split_budget
from millpond.policy.view import View
from tests.helpers.papers.fixture import COLUMN_SUMS
from tests.helpers.papers.keyed import run, sets, text, view

d2o = METHODS.get("d2o")


def unit(cosines: list[float]) -> torch.Tensor:
    """Keys of length 1 with these cosines to the first one, (1, n, 2)."""
    return torch.tensor([[[u, math.sqrt(1 - u * u)] for u in cosines]], dtype=torch.float64)


# ---------------------------------------------------------------------- layers


def shown(signal: list[list[float]], valid: int | None = None) -> View:
    n = len(signal[0])
    positions = torch.arange(n, dtype=torch.int32).expand(len(signal), -1).clone()
    if valid is not None:
        positions[:, valid:] = -1
    return View(positions, torch.tensor(signal), seen=n, layer=0)


def test_variance_of_the_fixture() -> None:
    density = AttentionDensity()
    assert density.measure(shown([COLUMN_SUMS])) == pytest.approx(0.931812, abs=1e-5)
    assert density.measure(shown([[*COLUMN_SUMS, 77.0]], valid=6)) == pytest.approx(0.931812, abs=1e-5)
    assert density.measure(shown([COLUMN_SUMS, [1.0] * 6])) == pytest.approx(0.465906, abs=1e-5)
    assert density.measure(shown([[5.0]])) == 0


def test_variances_within_a_layer() -> None:
    """Three heads with variances 0, 1 and 4 are scaled to 0, 1/4 and 1."""
    rows = [[2.0, 2.0, 2.0], [1.0, 2.0, 3.0], [0.0, 2.0, 4.0]]
    assert AttentionDensity("heads").measure(shown(rows)) == pytest.approx(1.25 / 3)
    assert AttentionDensity("heads").measure(shown(rows[:1])) == 0


@pytest.mark.parametrize("scale", ["relative", "absolute"])
def test_shares_of_layers(scale: str) -> None:
    measured = [2.0, 1.0, 0.0, 1.0]
    by = 2.0 if scale == "relative" else 1.0
    found = AttentionDensity(scale).decide(measured)  # type: ignore[arg-type]
    total = sum(math.exp(-f / by) for f in measured)
    assert found.wanted(10, 0, [99] * 4) == pytest.approx([40 * math.exp(-f / by) / total for f in measured])
    assert sum(split_budget(found, 10, 2, [99] * 4)) == 40


@pytest.mark.parametrize("scale", ["relative", "absolute", "heads"])
def test_layers_alike_have_the_same(scale: str) -> None:
    for f in (0.0, 3.0, 900.0):
        found = AttentionDensity(scale).decide([f] * 3)  # type: ignore[arg-type]
        assert found.wanted(10, 0, [99] * 3) == pytest.approx([10.0] * 3)


def test_a_variance_of_thousands_is_no_overflow() -> None:
    assert AttentionDensity("absolute").decide([5000.0, 9000.0]).wanted(10, 0, [99] * 2) == pytest.approx([20.0, 0.0])
    shares = AttentionDensity().decide([5000.0, 9000.0]).wanted(10, 0, [99] * 2)
    assert shares[0] == pytest.approx(20 / (1 + math.exp(-4 / 9)))


# ---------------------------------------------------------------------- tokens


def test_the_threshold_follows_the_mean() -> None:
    """Means .8, .6, .9 at a rate of .7: .8, .66, .828."""
    tau = nothing = torch.tensor([torch.nan], dtype=torch.float64)
    for likeness, expected in (([0.7, 0.9], 0.8), ([0.6], 0.66), ([0.9, float("-inf")], 0.828)):
        tau = follow(torch.tensor([likeness], dtype=torch.float64), tau, 0.7)
        assert float(tau) == pytest.approx(expected)
    assert torch.equal(follow(torch.tensor([[float("-inf")]]), tau, 0.7), tau)
    assert follow(torch.tensor([[float("-inf")]]), nothing, 0.7).isnan().all()


def take(merge: MergeAboveThreshold, cosines: list[float], tau: float | None = None, masses: list[float] | None = None):  # type: ignore[no-untyped-def]
    """What entry 0 becomes when the others leave; values are 1, 10, 100, ..."""
    keys = unit([1.0, *cosines])
    values = torch.tensor([[[10.0**j] for j in range(keys.shape[1])]], dtype=torch.float64)
    look = view(keys, values, signal=torch.arange(1.0, keys.shape[1] + 1)[None])
    if tau is not None:
        look = replace(look, memory=torch.tensor(tau, dtype=torch.float64))
    if masses is not None:
        look = replace(look, log_masses=torch.tensor([masses]).log())
    keep = torch.tensor([[True] + [False] * len(cosines)])
    return merge.merge(look, keep, look.signal, 0), keys, values  # type: ignore[arg-type]


def test_convex_weights() -> None:
    """u = (.9, .8) under a threshold of .1: centre .367165, .332225, .300610."""
    found, keys, values = take(MergeAboveThreshold(), [0.9, 0.8], tau=-2.5)
    weights = torch.tensor([0.367165, 0.332225, 0.300610], dtype=torch.float64)
    assert float(weights.sum()) == pytest.approx(1, abs=1e-6)
    assert torch.allclose(found.values[0, 0], (weights[:, None] * values[0]).sum(0), rtol=1e-5)
    assert torch.allclose(found.keys[0, 0], (weights[:, None] * keys[0]).sum(0), rtol=1e-5)
    assert float(found.scores[0, 0]) == 1  # the centre's own
    assert float(found.log_masses[0, 0].exp()) == pytest.approx(3)
    assert float(found.memory) == pytest.approx(0.7 * 0.85 + 0.3 * -2.5)


def test_what_is_below_the_threshold_is_dropped() -> None:
    """The first time the threshold is the mean .85 of .9 and .8."""
    found, _, values = take(MergeAboveThreshold(), [0.9, 0.8])
    w = math.exp(0.9) / (math.exp(0.9) + math.e)
    assert float(found.values[0, 0]) == pytest.approx((1 - w) * 1 + w * 10)
    assert float(found.memory) == pytest.approx(0.85)
    found, _, values = take(MergeAboveThreshold(), [0.9, 0.8], tau=9.0)
    assert torch.equal(found.values, values)
    assert not found.log_masses.any()


def test_equal_likenesses_are_all_merged() -> None:
    """However their mean is rounded."""
    found, _, _ = take(MergeAboveThreshold(), [0.1] * 3 + [0.1 + 1e-9] * 3)
    assert float(found.log_masses[0, 0].exp()) == pytest.approx(7)


def test_the_official_code_shrinks() -> None:
    """Three of u = .7: (1 + 2.1) / 4 = .775."""
    merge = MergeAboveThreshold(0.5, shrinking=True)
    keys = unit([1.0, 0.7, 0.7, 0.7])
    look = view(keys, torch.ones(1, 4, 1, dtype=torch.float64), signal=torch.zeros(1, 4))
    found = merge.merge(look, torch.tensor([[True, False, False, False]]), torch.zeros(1, 4), 0)
    assert float(found.values[0, 0]) == pytest.approx(0.775)


def test_masses_weigh() -> None:
    found, _, _ = take(MergeAboveThreshold(), [0.9], masses=[2, 3])
    a, b = 2 * math.e, 3 * math.exp(0.9)
    assert float(found.values[0, 0]) == pytest.approx((a * 1 + b * 10) / (a + b))
    assert float(found.log_masses[0, 0].exp()) == pytest.approx(5)


def test_heads_decide_for_themselves_by_one_threshold() -> None:
    """Means over both heads: (.9 + .5) / 2 = .7; only the first head merges."""
    keys = torch.cat([unit([1.0, 0.9]), unit([1.0, 0.5])])
    values = torch.tensor([[[0.0], [4.0]]] * 2, dtype=torch.float64)
    look = view(keys, values, signal=torch.zeros(2, 2))
    found = MergeAboveThreshold().merge(look, torch.tensor([[True, False]] * 2), torch.zeros(2, 2), 0)
    w = math.exp(0.9) / (math.exp(0.9) + math.e)
    assert found.values[:, 0, 0].tolist() == pytest.approx([4 * w, 0])
    assert float(found.memory) == pytest.approx(0.7)  # type: ignore[arg-type]


# ---------------------------------------------------------------------- the cache


def layer(options: dict[str, object], budget: int = 12):  # type: ignore[no-untyped-def]
    """The policy with every layer alike, for a cache of one layer."""
    policy = d2o(sinks=1, **options)
    return replace(policy, layers=METHODS.get("h2o")().layers)


def test_kept_sets_are_those_of_h2o() -> None:
    q, k, v = text(heads=2, n=30)
    found = sets(run(layer({}), 12, q, k, v))
    assert found == sets(run(METHODS.get("h2o")(sinks=1), 12, q, k, v))


def test_the_threshold_is_of_each_sequence_and_forgotten_with_it() -> None:
    q, k, v = text(heads=2, n=30)
    fresh = run(layer({}), 12, q, k, v, prompt=20)
    cache = run(layer({}), 12, k, q, v, prompt=20)
    assert set(cache.sequence_state.memories) == {0}
    cache.reset()
    cache.tracker.reset()
    assert not cache.sequence_state.memories
    again = run(layer({}), 12, q, k, v, prompt=20)
    assert torch.equal(again.read(0).values, fresh.read(0).values)


def test_beams_take_their_threshold_along() -> None:
    q, k, v = text(heads=2, n=30)
    cache = run(layer({}), 12, q, k, v, prompt=20)
    before = cache.sequence_state.memories[0]
    state = cache.fork()
    cache.select([0, 0])
    assert [float(cache.sequence_state.memories[s]) for s in (0, 1)] == [float(before)] * 2
    cache.sequence_state.memories[0] = before + 1
    cache.restore(state)
    assert cache.sequence_state.memories == {0: before}


@pytest.mark.parametrize(
    ("options", "text_"),
    [
        ({"variant": "official_code", "mass_bias": True}, "mass_bias needs weights that sum to 1"),
        ({"rate": "slow"}, "rate='slow' must be a number, or auto"),
        ({"rate": 0.0}, "rate=0.0 must be above 0 and at most 1"),
        ({"decode": "grow", "every": 2}, "nothing is merged while decoding"),
    ],
)
def test_options_out_of_range(options: dict[str, object], text_: str) -> None:
    with pytest.raises(OptionError, match=text_):
        d2o(**options)
