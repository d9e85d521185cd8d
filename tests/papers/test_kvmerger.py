"""KVMerger by hand: merging sets, pivots, Gaussian weights, both kinds of threshold."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import millpond as mp
from millpond.errors import DataError, OptionError
from millpond.hf.calibration.merging import layer_thresholds
from millpond.methods import METHODS
from millpond.methods.kvmerger import GaussianRuns, RunPivots
from millpond.policy.head_allocation import AboveThreshold
from millpond.policy.policy import Policy
from millpond.policy.protect import Protect
from tests.helpers.hf.families import shared_model
from tests.helpers.papers.keyed import run, sets, text, view

kvmerger = METHODS.get("kvmerger")
DEGREES = [0, 10, 20, 80, 85, 170]
KEYS = torch.tensor([[[math.cos(math.radians(a)), math.sin(math.radians(a))] for a in DEGREES]], dtype=torch.float64)
VALUES = torch.tensor([[[1.0], [2.0], [6.0], [4.0], [8.0], [16.0]]], dtype=torch.float64)
ATTENTION = torch.tensor([[3.0, 1.0, 0.5, 0.25, 0.75, 0.1]])


def policy(eps: float | None = 0.75, top: float = 0.0, sigma: float = 5.0, recent: int = 0) -> Policy:
    pivots = RunPivots(eps=eps, top=top)
    heads = {} if eps is None else {"heads": AboveThreshold(0.0)}
    return Policy(
        score=pivots,
        protect=Protect(recent=recent),
        merge=GaussianRuns(pivots, sigma),
        every_step=False,
        **heads,  # type: ignore[arg-type]
    )


Slot = tuple[list[float], list[float], float, float]


def merged(chosen: Policy, budget: int = 6, **given: Tensor) -> dict[int, Slot]:
    """By position: key, value, mass and score of what stays of the six."""
    plan = chosen.plan(replace(view(KEYS, VALUES, signal=ATTENTION), **given), budget)
    columns = plan.keep[0].nonzero()[:, 0].tolist()
    if plan.merged is None:
        return {j: (KEYS[0, j].tolist(), VALUES[0, j].tolist(), 1.0, float(ATTENTION[0, j])) for j in columns}
    m = plan.merged
    return {
        j: (m.keys[0, j].tolist(), m.values[0, j].tolist(), float(m.log_masses[0, j].exp()), float(m.scores[0, j]))
        for j in columns
    }


def test_sets_and_pivots_by_eps() -> None:
    """Cosines .985 .985 .5 .996 .087 make the sets {0, 1, 2} {3, 4} {5}; the pivots have most attention."""
    found = merged(policy())
    assert sorted(found) == [0, 4, 5]
    assert [found[j][2] for j in (0, 4, 5)] == pytest.approx([3, 2, 1])
    assert [found[j][3] for j in (0, 4, 5)] == pytest.approx([4.5, 1.0, 0.1])


def test_weights_by_hand() -> None:
    """Distances from pivot 0 are chords of 10 and 20 degrees; sigma 5."""
    key, value, _, _ = merged(policy())[0]
    weights = [0.333669, 0.333466, 0.332865]
    assert value == pytest.approx([sum(w * x for w, x in zip(weights, (1, 2, 6), strict=True))], abs=5e-6)
    expected = [sum(w * float(KEYS[0, j, d]) for j, w in enumerate(weights)) for d in (0, 1)]
    assert key == pytest.approx(expected, abs=2e-6)


def test_eps_above_one_changes_nothing() -> None:
    found = merged(policy(eps=1.01))
    assert sorted(found) == list(range(6))
    assert all(found[j][1] == VALUES[0, j].tolist() for j in range(6))


@pytest.mark.parametrize(("budget", "expected"), [(5, [0, 1, 2, 4, 5]), (3, [0, 4, 5]), (2, [0, 5]), (1, [0])])
def test_a_budget_is_met_by_the_most_alike_pairs(budget: int, expected: list[int]) -> None:
    """.996 first, the two of .985, then .5, which joins {0..2} and {3, 4}, and at last .087."""
    found = merged(policy(eps=None), budget)
    assert sorted(found) == expected
    assert sum(f[2] for f in found.values()) == pytest.approx(6)


def test_equal_keys_become_one_exact_mean() -> None:
    values = torch.arange(6, dtype=torch.float64)[None, :, None]
    shown = view(torch.ones(1, 6, 2, dtype=torch.float64), values, signal=ATTENTION)
    plan = policy().plan(shown, 6)
    assert plan.keep[0].tolist() == [True] + [False] * 5
    assert plan.merged is not None
    assert float(plan.merged.values[0, 0]) == pytest.approx(2.5, abs=1e-12)
    assert plan.merged.keys[0, 0].tolist() == pytest.approx([1, 1], abs=1e-12)


def test_a_small_sigma_leaves_the_pivot_alone() -> None:
    assert merged(policy(sigma=1e-3))[0][:2] == (KEYS[0, 0].tolist(), VALUES[0, 0].tolist())


def test_what_is_protected_stays_alone() -> None:
    """The newest two, and the one of most attention among the others: only 1 and 2 can join."""
    found = merged(policy(recent=2, top=0.2))
    assert sorted(found) == [0, 1, 3, 4, 5]
    assert [found[j][2] for j in (0, 1, 3, 4, 5)] == pytest.approx([1, 2, 1, 1, 1])


def test_pivots_of_least_attention_leave_where_nothing_can_join() -> None:
    """Budget 3 of which 2 are the newest: 0 to 3 join to one."""
    assert sorted(merged(policy(eps=None, recent=2), 3)) == [0, 4, 5]
    found = merged(policy(eps=None, recent=2, top=1.0), 4)  # nobody may join
    assert sorted(found) == [0, 1, 4, 5]
    assert all(f[2] == 1 for f in found.values())


def test_masses_weigh() -> None:
    """Entry 1 stands for three: its weight is three times as large, and the masses add up to five."""
    masses = torch.tensor([[1.0, 3, 1, 1, 1, 1]]).log()
    _, value, mass, _ = merged(policy(sigma=1e6), log_masses=masses)[0]
    assert value == pytest.approx([(1 + 3 * 2 + 6) / 5])
    assert mass == pytest.approx(5)


@pytest.mark.parametrize(("eps", "budget"), [("auto", 20), (0.3, 50)])
def test_every_token_counts_once_and_values_lie_between(eps: float | str, budget: int) -> None:
    q, k, v = text(heads=3, n=50)
    cache = run(kvmerger(eps=eps, mass_bias=True, recent=0.2, top=0.1), budget, q, k, v)
    dense = cache.read(0)
    assert dense.log_masses is not None
    for head, kept in enumerate(sets(cache)):
        assert len(kept) == 20 if eps == "auto" else 15 <= len(kept) < 50
        assert float(dense.log_masses[head, : len(kept)].exp().sum()) == pytest.approx(50, rel=1e-5)
        assert set(range(46, 50)) <= set(kept)
        values = dense.values[head, : len(kept)]
        assert (values <= v[head].amax(0)).all()
        assert (values >= v[head].amin(0)).all()
        assert not torch.equal(values, v[head, kept])


def test_one_set_of_runs_for_all_heads() -> None:
    q, k, v = text(heads=3, n=50)
    own, one = (sets(run(kvmerger(shared=shared), 20, q, k, v)) for shared in (False, True))
    assert one[0] == one[1] == one[2]
    assert len({tuple(row) for row in own}) == 3


def test_it_grows_or_goes_on_merging() -> None:
    q, k, v = text(heads=2, n=50)
    assert [len(row) for row in sets(run(kvmerger(), 20, q, k, v, prompt=40))] == [30, 30]
    assert [len(row) for row in sets(run(kvmerger(decode="merge"), 20, q, k, v, prompt=40))] == [20, 20]
    # after 40, with 4 to gather: 20, 21, 22, 23, then 24 are merged to 20; the tenth step comes two steps later
    assert [len(row) for row in sets(run(kvmerger(decode="merge", every=4), 20, q, k, v, prompt=40))] == [22, 22]


@pytest.mark.parametrize(
    ("options", "text_"),
    [
        ({"eps": "many"}, "eps='many' must be a number, or auto"),
        ({"eps": 0.5, "decode": "merge"}, "a fixed eps has not"),
        ({"every": 3}, "nothing is merged while decoding"),
        ({"sigma": 0.0}, "sigma=0.0 must be 1e-06 to 1,000,000"),
        ({"top": 1.5}, "top=1.5 must be 0 to 1"),
    ],
)
def test_options_out_of_range(options: dict[str, object], text_: str) -> None:
    with pytest.raises(OptionError, match=text_):
        kvmerger(**options)


def test_a_threshold_for_each_layer() -> None:
    """Every layer joins by its own number, as with that number alone."""
    for layer, eps in enumerate((0.99, 0.75, 0.05)):
        chosen = policy(eps=None)
        own = replace(chosen, score=RunPivots(eps=(0.99, 0.75, 0.05), top=0.0), heads=AboveThreshold(0.0))
        own = replace(own, merge=GaussianRuns(own.score))  # type: ignore[arg-type]
        found = merged(own, layer=layer)  # type: ignore[arg-type]
        assert sorted(found) == sorted(merged(policy(eps=eps)))
    assert kvmerger(eps="0.9;0.8").score.eps == (0.9, 0.8)


@pytest.mark.parametrize("eps", ["0.9;", "nan;0.5", "0.5;11", ";".join(["0.5"] * 1025), "0.5,0.6"])
def test_thresholds_that_are_none(eps: str) -> None:
    with pytest.raises(OptionError, match=r"eps=.* must be a number, or auto, or at most"):
        kvmerger(eps=eps)


def test_thresholds_are_those_of_the_model() -> None:
    """They leave the budget on the text that they were measured on, layer by layer, and belong to its layers."""
    model = shared_model("llama")
    ids = torch.randint(2, 90, (200,), generator=torch.Generator().manual_seed(1))
    options = {"recent": 0.1, "top": 0.1}
    thresholds = layer_thresholds(model, ids, "50%", windows=1, length=200, **options)
    assert len(thresholds) == model.config.num_hidden_layers
    assert len(set(thresholds)) == len(thresholds)
    found = ";".join(f"{eps:.9f}" for eps in thresholds)
    with mp.compress(model, "kvmerger", "100%", "auto", eps=found, recent=20, top=0.05) as cache, torch.no_grad():
        model(ids[None], cache=cache)
        for layer_cache in cache.layer_caches:
            layer_cache.run_plans()
            assert float(layer_cache.stored.mean()) == pytest.approx(100, abs=12)
    with pytest.raises(OptionError, match="eps has 3 thresholds, and the model has 2 layers"):
        mp.compress(model, "kvmerger", "100%", eps="0.5;0.5;0.5")
    with pytest.raises(DataError, match="at least one window"):
        layer_thresholds(model, ids[:50], "50%")
