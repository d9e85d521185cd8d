"""Compositions that make no sense are refused; NaN scores are reported; the decode rule says what the policy says."""

import pytest
import torch

from millpond.errors import NumericsError, OptionError
from millpond.kernels.decode_rules import KEEP_ALL, UNBOUNDED, DecodeRule, Evict, Reduce, Signal
from millpond.methods import METHODS
from millpond.policy.decode_rule import on_sliding_layer
from millpond.policy.head_allocation import Ada
from millpond.policy.policy import Policy
from millpond.policy.scores.attention import AccumulatedAttention
from millpond.policy.view import View


def test_decode_rules_of_the_methods() -> None:
    rules = {name: METHODS.get(name)().decode_rule(2) for name in METHODS.names()}
    assert rules["full"] == rules["snapkv"] == rules["ada"] == KEEP_ALL
    assert rules["h2o"] == DecodeRule(Signal.SUM, Reduce.MEAN, Evict.ACC, sinks=4, seed=rules["h2o"].seed)
    assert rules["tova"].shared
    assert rules["tova"].signal is Signal.LAST
    assert rules["window"].evict is rules["streaming"].evict is Evict.OLDEST
    assert rules["random"].evict is Evict.RANDOM
    assert METHODS.get("h2o")(average=True).decode_rule(0).evict is Evict.ACC_MEAN


def test_layers_draw_different_samples() -> None:
    policy = METHODS.get("random")(seed=3)
    assert policy.decode_rule(0).seed != policy.decode_rule(1).seed


def test_nan_scores_are_reported() -> None:
    view = View(torch.arange(3, dtype=torch.int32)[None], torch.tensor([[1.0, float("nan"), 1.0]]), 3, layer=7)
    with pytest.raises(NumericsError, match="layer 7"):
        Policy(score=AccumulatedAttention()).plan(view, 2)


def test_a_shared_set_cannot_have_head_budgets() -> None:
    with pytest.raises(OptionError, match="shared by all heads"):
        Policy(score=AccumulatedAttention(), heads=Ada(), shared=True)


def test_what_grows_cannot_evict_at_each_token() -> None:
    for name in ("h2o", "tova"):
        for decode in ("grow", "once"):
            with pytest.raises(OptionError, match='prefill="greedy" evicts at each token'):
                METHODS.get(name)(prefill="greedy", decode=decode)
    with pytest.raises(OptionError, match="compressed once grows while decoding"):
        METHODS.get("chunkkv")(score="h2o/decode=once", decode="evict")


def test_a_cache_that_grows_has_no_caps() -> None:
    view = View(torch.arange(9, dtype=torch.int32)[None], torch.rand(1, 9), 9, layer=0)
    plan = Policy(score=AccumulatedAttention(), every_step=False).plan(view, 4)
    assert plan.keep.sum() == 4
    assert plan.caps.tolist() == [UNBOUNDED]


def test_sliding_layers_drop_what_nothing_can_see() -> None:
    assert on_sliding_layer(KEEP_ALL).evict is Evict.OLDEST
    h2o = METHODS.get("h2o")().decode_rule(0)
    assert on_sliding_layer(h2o) is h2o
