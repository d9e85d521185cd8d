"""full, window, random: what they keep, by hand."""

import torch

from millpond.methods import METHODS
from tests.helpers.papers.fixture import LOGITS, N, feed, kept, make_layer_cache, run


def test_full_keeps_everything() -> None:
    assert run(METHODS.get("full")(), budget=1) == list(range(N))


def test_window_keeps_the_newest() -> None:
    assert run(METHODS.get("window")(), budget=3) == [3, 4, 5]
    assert run(METHODS.get("window")(sinks=1), budget=3) == [0, 4, 5]


def test_random_is_a_uniform_sample_without_order() -> None:
    """One shot and step by step keep the same sample; over many seeds every unprotected entry is kept equally often."""
    n, budget = 40, 8
    counts = torch.zeros(n)
    logits = torch.zeros(2, n, n, dtype=torch.float64)
    for seed in range(300):
        policy = METHODS.get("random")(seed=seed, recent=0, sinks=0)
        cache = make_layer_cache(policy, budget)
        feed(cache, logits, 0, n)
        counts[kept(cache)] += 1
        assert kept(cache, 0) != kept(cache, 1)
        if seed < 5:
            steps = make_layer_cache(policy, budget)
            feed(steps, logits, 0, 5)
            for t in range(5, n):
                feed(steps, logits, t, t + 1)
            assert kept(steps) == kept(cache)
    expected = 300 * budget / n
    chi_square = float(((counts - expected) ** 2 / (expected * (1 - budget / n))).sum())
    assert chi_square < 73  # 39 degrees of freedom, p = 0.001


def test_random_seeds_differ() -> None:
    picks = {tuple(run(METHODS.get("random")(seed=s, recent=0, sinks=0), budget=3)) for s in range(20)}
    assert len(picks) > 5
    assert LOGITS.shape == (N, N)
