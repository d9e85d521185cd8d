"""Merging in the slots behind each step does what a plan at each step does, and plans go on where it cannot."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import millpond as mp
from millpond.cache.layer.layer_cache import LayerCache
from millpond.errors import NumericsError
from millpond.kernels.args import AttentionShape
from millpond.methods import METHODS
from millpond.policy.head_allocation import Ada
from millpond.policy.merging import Merge, Merged
from millpond.policy.policy import Policy
from millpond.policy.step_merge import slot_plan
from millpond.policy.view import View
from tests.helpers.matrix.models import llama, prompts
from tests.helpers.papers.fixture import make_layer_cache
from tests.helpers.papers.keyed import text

CASES: dict[str, dict[str, Any]] = {
    "cam": {"sinks": 1, "targets": 3},
    "cam/mean": {"sinks": 1, "targets": 0, "attention": "mean", "over": "max", "mass_bias": True},
    "cam/last": {"sinks": 2, "targets": 5, "attention": "last", "over": "recent", "draw": True, "every": 3},
    "d2o": {"sinks": 1},
    "d2o/mass": {"sinks": 0, "mass_bias": True, "every": 4},
    "d2o/official": {"variant": "official_code"},
    "ems": {"window": 4, "threshold": 0.0, "cover": 1.0, "every": 1},
    "ems/mass": {"window": 4, "threshold": -1.0, "cover": 1.0, "mass_bias": True, "every": 2},
    "merge_on_evict": {"score": "h2o/sinks=1"},
    "merge_on_evict/mass": {"score": "h2o/average=1", "mass_bias": True},
    "merge_on_evict/random": {"score": "random", "every": 3},
}


@dataclass(frozen=True)
class Own:
    """A merge of a user, of which no kernel knows anything."""

    inner: Merge

    def merge(self, view: View, keep: Tensor, value: Tensor, seed: int) -> Merged:
        return self.inner.merge(view, keep, value, seed)


def policy_of(case: str) -> Policy:
    """The policy of a case, all layers alike."""
    return replace(METHODS.get(case.split("/")[0])(**CASES[case]), layers=METHODS.get("h2o")().layers)


def planned(policy: Policy) -> Policy:
    assert policy.merge is not None
    return replace(policy, merge=Own(policy.merge))


def after(policy: Policy, dtype: torch.dtype, budget: int = 12) -> tuple[LayerCache, Tensor]:
    """The cache of one layer after a prompt of 20 and 24 steps in a batch of two, and the outputs of those."""
    q, k, v = (torch.stack([a, b]).to(dtype) for a, b in zip(text(n=44), text(n=44, seed=1), strict=True))
    cache = make_layer_cache(policy, budget, slots=4)
    mask = torch.ones(2, 44, dtype=torch.bool)
    mask[1, :3] = False  # a pad in front
    mask[0, 29:31] = False  # one sequence pauses
    out = []
    for first, last in [(0, 20), *((t, t + 1) for t in range(20, 44))]:
        part = (x[:, :, first:last] for x in (q, k, v))
        out.append(cache.attend(*part, mask[:, :last], AttentionShape(1.0)))
    return cache, torch.cat(out[1:], 2)


@pytest.mark.covering
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("case", CASES)
def test_equals_a_plan_at_each_step(case: str, dtype: torch.dtype) -> None:
    policy = policy_of(case)
    assert slot_plan(policy, 0) is not None
    assert slot_plan(planned(policy), 0) is None
    (ours, out), (theirs, expected) = after(policy, dtype), after(planned(policy), dtype)
    bound = 1e-5 if dtype is torch.float64 else 1e-3
    assert torch.allclose(out, expected, atol=bound)
    assert (ours.stored == theirs.stored).all()
    for sequence in (0, 1):
        a, b = ours.read(sequence), theirs.read(sequence)
        assert torch.equal(a.positions, b.positions)
        for x, y in ((a.keys, b.keys), (a.values, b.values), (a.scores, b.scores), (a.log_masses, b.log_masses)):
            assert (x is None) is (y is None)
            assert x is None or y is None or torch.allclose(x, y, atol=bound)
    assert ours.sequence_state.memories.keys() == theirs.sequence_state.memories.keys()
    for cache in (ours, theirs):
        assert cache.table is not None
        cache.table.pool.check_integrity([cache.table.held()])
    assert ours.table is not None
    assert theirs.table is not None
    assert len(ours.table.held()) == len(theirs.table.held())


@pytest.mark.parametrize(
    "policy",
    [
        METHODS.get("merge_on_evict")(score="snapkv/decode=evict"),  # its score is pooled over a window
        replace(METHODS.get("merge_on_evict")(score="h2o"), heads=Ada()),
        METHODS.get("merge_on_evict")(score="tova"),  # all heads drop the same entry
        METHODS.get("kvmerger")(decode="merge"),
        METHODS.get("ems")(kernel=3),
        replace(METHODS.get("d2o")(), shared=True),
        METHODS.get("d2o")(decode="grow"),
        METHODS.get("h2o")(),
        METHODS.get("elastic")(),
    ],
)
def test_what_only_a_plan_can_do(policy: Policy) -> None:
    assert slot_plan(policy, 0) is None


def test_nan_is_refused() -> None:
    cache, _ = after(policy_of("d2o"), torch.float32)
    bad = torch.full((2, 2, 1, 6), torch.nan)
    with pytest.raises(NumericsError):
        cache.attend(bad, bad, bad, None, AttentionShape(1.0))


def test_a_merge_of_ones_own_generates() -> None:
    model, (ids, mask) = llama(dtype=torch.float32), prompts(2)
    found = []
    for policy in (policy_of("merge_on_evict"), planned(policy_of("merge_on_evict"))):
        with torch.no_grad(), mp.compress(model, policy, 12) as cache:
            found.append(
                model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=12, do_sample=False, cache=cache)
            )
    assert torch.equal(*found)
