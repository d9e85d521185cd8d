"""Merge on evict by hand: where values go, their weights, what stays as it was; masses; refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from millpond.errors import OptionError
from millpond.kernels.merge.rules import BLOCK, cosines, nearest_in_torch
from millpond.methods import METHODS
from millpond.methods.merge_on_evict import MergeIntoNearest
from millpond.policy.policy import Policy
from millpond.policy.protect import Protect
from millpond.policy.scores.attention import AccumulatedAttention
from tests.helpers.papers.keyed import cosine, run, sets, text, view

merge_on_evict = METHODS.get("merge_on_evict")
KEYS = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [4.0, 3.0], [0.0, -2.0], [0.0, 5.0]]], dtype=torch.float64)
VALUES = torch.tensor([[[2.0], [3.0], [4.0], [5.0], [1.0]]], dtype=torch.float64)
ATTENTION = torch.tensor([[5.0, 4.0, 3.0, 2.0, 1.0]])


def plan(threshold: float = 0.0, sinks: int = 0, masses: list[float] | None = None) -> tuple[list[float], list[float]]:
    """Values and masses of 0 and 1, which stay of the five."""
    policy = Policy(
        score=AccumulatedAttention(), protect=Protect(sinks=sinks), merge=MergeIntoNearest(threshold, sinks)
    )
    shown = view(KEYS, VALUES, signal=ATTENTION)
    if masses is not None:
        shown = replace(shown, log_masses=torch.tensor([masses]).log())
    found = policy.plan(shown, 2)
    assert found.keep[0].tolist() == [True, True, False, False, False]
    assert found.merged is not None
    assert torch.equal(found.merged.keys, KEYS)
    assert torch.equal(found.merged.scores, ATTENTION)
    return found.merged.values[0, :2, 0].tolist(), found.merged.log_masses[0, :2].exp().tolist()


def test_values_and_weights_by_hand() -> None:
    """2 is most like 0 (.8), 4 equals 1; 3 has cosine 0 with 0 and -1 with 1: weight 0.

    w_2 = .8 * 4 / (4 + 2), w_4 = 1 / (1 + 3).
    """
    values, masses = plan()
    w2, w4 = 0.8 * 4 / 6, 1 / 4
    assert values == pytest.approx([(2 + w2 * 4) / (1 + w2), (3 + w4) / (1 + w4)])
    assert masses == pytest.approx([3, 2])  # 3 came to 0 with weight 0


def test_what_is_less_alike_is_dropped() -> None:
    values, masses = plan(threshold=0.9)
    assert values == pytest.approx([2, (3 + 0.25) / 1.25])
    assert masses == pytest.approx([1, 2])
    assert plan(threshold=1.5) == ([2, 3], [1, 1])


def test_sinks_take_nothing_in() -> None:
    """With 0 a sink, 2 goes to 1 (.6), 4 too, and 3 (-1) nowhere."""
    values, masses = plan(sinks=1)
    w2, w4 = 0.6 * 4 / 7, 1 / 4
    assert values == pytest.approx([2, (3 + w2 * 4 + w4) / (1 + w2 + w4)])
    assert masses == pytest.approx([1, 3])


def test_masses_weigh() -> None:
    values, masses = plan(threshold=0.9, masses=[1, 2, 1, 1, 3])
    assert values[1] == pytest.approx((2 * 3 + 3 * 0.25) / (2 + 3 * 0.25))
    assert masses == pytest.approx([1, 5])


def test_nearest_in_blocks_against_loops() -> None:
    make = torch.Generator().manual_seed(0)
    n = BLOCK + 60
    keys = torch.randn(2, n, 3, generator=make, dtype=torch.float64)
    targets = torch.rand(2, n, generator=make) < 0.02
    targets[1, : n // 2] = False
    sources = ~targets & (torch.rand(2, n, generator=make) < 0.95)
    into, alike = nearest_in_torch(cosines(keys), sources, targets)
    for h in range(2):
        for j in range(n):
            if not sources[h, j]:
                assert (int(into[h, j]), float(alike[h, j])) == (j, float("-inf"))
                continue
            of = {c: cosine(keys[h, j], keys[h, c]) for c in targets[h].nonzero()[:, 0].tolist()}
            best = max(of, key=lambda c: of[c])
            assert int(into[h, j]) == best
            assert float(alike[h, j]) == pytest.approx(of[best], abs=1e-12)


def test_a_head_without_targets_drops() -> None:
    nobody = torch.zeros(1, 4, dtype=torch.bool)
    into, alike = nearest_in_torch(cosines(torch.ones(1, 4, 2)), ~nobody, nobody)
    assert into.tolist() == [[0, 1, 2, 3]]
    assert not (alike > float("-inf")).any()


BASES: dict[str, tuple[str, dict[str, object]]] = {
    "h2o": ("h2o", {}),
    "snapkv/window=4/kernel=3": ("snapkv", {"window": 4, "kernel": 3}),
    "tova": ("tova", {}),
    "random": ("random", {}),
    "ada/every=0/score=h2o": ("ada", {"every": 0, "score": "h2o"}),
    "knorm/decode=evict": ("knorm", {"decode": "evict"}),
}


@pytest.mark.parametrize("score", BASES)
def test_without_merging_it_is_the_method_it_stands_on(score: str) -> None:
    """Above a cosine of 1 nothing is merged: kept sets over a prompt and steps, and every stored number."""
    q, k, v = text(heads=2, n=44)
    name, options = BASES[score]
    base = METHODS.get(name)(**options)
    plain = run(base, 12, q, k, v, prompt=30)
    over = run(merge_on_evict(score=score, threshold=1.5), 12, q, k, v, prompt=30)
    assert sets(plain) == sets(over)
    for a, b in zip(plain.read(0)[:3], over.read(0)[:3], strict=True):
        assert torch.equal(a, b)


def test_keys_stay_and_values_lie_between() -> None:
    q, k, v = text(heads=2, n=44)
    dense = run(merge_on_evict(score="h2o/sinks=1", every=3), 12, q, k, v, prompt=30).read(0)
    for h in range(2):
        held = dense.positions[h][dense.positions[h] >= 0].long()
        assert torch.equal(dense.keys[h, : len(held)], k[h, held])
        values = dense.values[h, : len(held)]
        assert (values <= v[h].amax(0)).all()
        assert (values >= v[h].amin(0)).all()
        assert torch.equal(values[0], v[h, 0])  # the sink
        assert not torch.equal(values, v[h, held])


@pytest.mark.parametrize(
    ("options", "text_"),
    [
        ({"score": "kvmerger"}, "merges already"),
        ({"score": "full"}, "keeps everything"),
        ({"score": "fastgen"}, "cannot be the score of another"),
        ({"score": "streaming"}, 'needs positions="absolute"'),
        ({"score": "ada/score=h2o"}, "compete every 8 steps"),
        ({"score": "duo_attention"}, "drop entries while decoding"),
        ({"every": 4}, "nothing is merged while decoding"),
        ({"every": 0}, "every=0 must be 1 to 16,777,216"),
        ({"threshold": -0.1}, "threshold=-0.1 must be 0 to 10"),
    ],
)
def test_what_cannot_merge_is_refused(options: dict[str, object], text_: str) -> None:
    with pytest.raises(OptionError, match=text_):
        merge_on_evict(**options)


def test_options_of_merging_belong_to_policies_that_merge() -> None:
    for settings in ({"mass_bias": True}, {"plan_every": 2}):
        with pytest.raises(OptionError, match=r"(mass_bias|plan_every) belongs to a policy that merges"):
            Policy(score=AccumulatedAttention(), **settings)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="nothing to merge"):
        Policy(merge=MergeIntoNearest())
