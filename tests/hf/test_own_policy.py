"""A policy of one's own, and what the cache does for a score that no kernel rule continues."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import millpond as mp
from millpond.errors import BudgetError, OptionError
from millpond.kernels.decode_rules import Evict, Signal
from millpond.methods import METHODS
from millpond.policy.policy import Policy
from millpond.policy.protect import Protect
from millpond.policy.scores.attention import AccumulatedAttention
from millpond.policy.view import View
from tests.helpers.hf.families import FAMILIES, shared_model, text
from tests.helpers.matrix.models import llama, prompts


def run(method: Any, model: Any = None, steps: int = 15, batch: int = 3, **options: Any) -> tuple[Any, Any]:
    """Greedy tokens and the positions kept [layer][sequence][head] after each step."""
    model, (ids, mask) = model or llama("gqa"), prompts(batch)
    kept = []
    with torch.no_grad(), mp.compress(model, method, page_slots=4, **options) as cache:
        step, seen, out = ids, mask, []
        for _ in range(steps):
            places = (seen.cumsum(1) - 1).clamp(min=0)[:, -step.shape[1] :]
            logits = model(step, attention_mask=seen, position_ids=places, cache=cache).logits
            step = logits[:, -1:].argmax(-1)
            out.append(step)
            kept.append([[cache.positions(layer, s) for s in range(batch)] for layer in range(len(cache.layers))])
            seen = torch.cat([seen, torch.ones(batch, 1, dtype=seen.dtype)], 1)
        cache.check_integrity()
    return torch.cat(out, 1).tolist(), kept


def test_a_policy_is_as_good_as_a_name() -> None:
    for name, options in {"h2o": {"sinks": 1}, "window": {}, "tova": {}}.items():
        assert run(METHODS.get(name)(**options), budget=12) == run(name, budget=12, **options)


def test_what_does_not_go_with_a_policy() -> None:
    policy = METHODS.get("h2o")()
    with pytest.raises(OptionError, match="sinks: options belong to a named method"):
        mp.compress(llama("gqa"), policy, sinks=2)
    with pytest.raises(OptionError, match="method=7 is neither the name of a method nor a Policy"):
        mp.compress(llama("gqa"), 7)  # type: ignore[arg-type]
    with pytest.raises(BudgetError, match="this policy keeps everything and takes no budget"):
        mp.compress(llama("gqa"), Policy(), "20%")
    with pytest.raises(BudgetError, match="budget 8 is smaller than sinks 9"):
        mp.compress(llama("gqa"), Policy(score=AccumulatedAttention(), protect=Protect(sinks=9)), 8)


@dataclass(frozen=True)
class Planned:
    """A score that no kernel rule continues, worth the same as another that has one."""

    base: Any
    evict: Evict | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.base, name)

    def score(self, view: View, seed: int) -> Tensor:
        value: Tensor = self.base.score(view, seed)
        return value


CASES: dict[str, dict[str, Any]] = {"h2o": {"sinks": 1}, "window": {"sinks": 2}, "random": {"recent": 2}}


@pytest.mark.covering
@pytest.mark.parametrize("budget", [14, "40%"])
@pytest.mark.parametrize("method", [*CASES, "ada"])
def test_a_plan_at_each_step_is_what_the_kernel_does(method: str, budget: Any) -> None:
    policy = METHODS.get("h2o")(sinks=1) if method == "ada" else METHODS.get(method)(**CASES[method])
    if method == "ada":
        policy = replace(policy, heads=METHODS.get("ada")().heads)
    planned = replace(policy, score=Planned(policy.score))
    assert planned.plans_each_step
    assert not policy.plans_each_step
    assert planned.decode_rule(0).evict is Evict.NEVER
    if method != "ada":
        assert run(planned, budget=budget) == run(policy, budget=budget)
        return
    tokens, kept = run(planned, budget=budget)  # heads go on competing: only the total of a layer stays
    assert all(len(heads) == 2 for layers in kept for layer in layers for heads in layer)
    totals = [[sum(map(len, heads)) for layer in layers for heads in layer] for layers in kept]
    assert all(total == totals[0] for total in totals)
    assert tokens


def assert_planning_keeps_the_same(name: str, policy: Policy) -> None:
    model, found = shared_model(name), []
    for chosen in (policy, replace(policy, score=Planned(policy.score))):
        with torch.no_grad(), mp.compress(model, chosen, 8) as cache:
            ids = text(1, 24)
            model(ids[:, :18], cache=cache)
            for t in range(18, 24):
                model(ids[:, t : t + 1], cache=cache)
            found.append([cache.positions(layer) for layer in range(len(cache.layers))])
    assert found[0] == found[1]


@pytest.mark.parametrize("name", [f.name for f in FAMILIES if f.windows])
def test_plans_on_sliding_layers(name: str) -> None:
    """Layers with a window end up with the same entries, whoever evicts."""
    assert_planning_keeps_the_same(name, METHODS.get("h2o")(sinks=0))


def test_plans_on_latents() -> None:
    assert_planning_keeps_the_same("deepseek_v3", METHODS.get("h2o")(sinks=1))


def test_a_score_that_looks_at_nothing_gathers_nothing() -> None:
    rule = METHODS.get("strided")().decode_rule(0)
    assert (rule.signal, rule.evict) == (Signal.NONE, Evict.SPACED)
    assert METHODS.get("strided")(heavy=0.1).decode_rule(0).signal is Signal.SUM
