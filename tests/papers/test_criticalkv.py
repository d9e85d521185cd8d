"""CriticalKV by hand: the two stages, the norms of projected values, real projections of real models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import millpond as mp
from millpond.errors import OptionError, UnsupportedModelError
from millpond.hf.model_profile import ModelProfile
from millpond.hf.signals.output_projection import output_maps
from millpond.methods import METHODS
from millpond.methods.criticalkv import CriticalValues, output_norms
from millpond.policy.head_allocation import Ada, Uniform
from millpond.policy.policy import Policy
from millpond.policy.protect import Protect
from millpond.policy.scores.attention import AccumulatedAttention
from millpond.policy.selection import keep_best
from millpond.policy.view import View
from tests.helpers.hf.eager import eager_attention_and_values
from tests.helpers.hf.families import one, shared_model
from tests.helpers.matrix.models import llama, prompts
from tests.helpers.papers.keyed import view

criticalkv = METHODS.get("criticalkv")
ATTENTION = [5.0, 4.0, 3.0, 2.0, 1.0, 0.5]
VALUES = [1.0, 1.0, 1.0, 3.0, 7.0, 9.0]  # times attention: 5, 4, 3, 6, 7, 4.5


def shown(pinned: Tensor | None = None) -> View:
    values = torch.tensor(VALUES)[None, :, None]
    look = view(values, values, signal=torch.tensor([ATTENTION]), pinned=pinned)
    return replace(look, outputs=lambda: torch.ones(1, 1, 1))


@pytest.mark.parametrize(
    ("budget", "first", "expected"),
    [
        (2, 0.5, [0, 4]),
        (3, 0.5, [0, 3, 4]),
        (4, 0.5, [0, 1, 3, 4]),
        (3, 0.0, [0, 3, 4]),
        (2, 0.0, [3, 4]),
        (5, 0.0, [0, 1, 3, 4, 5]),
        (4, 1.0, [0, 1, 2, 3]),
    ],
)
def test_two_stages_by_hand(budget: int, first: float, expected: list[int]) -> None:
    plan = Policy(score=CriticalValues(AccumulatedAttention(), first)).plan(shown(), budget)
    assert plan.keep[0].nonzero()[:, 0].tolist() == expected


def test_the_first_stage_is_a_share_of_what_is_not_protected() -> None:
    """Budget 4 with position 5 protected: one of three by attention (0), then 4 and 3."""
    policy = Policy(score=CriticalValues(AccumulatedAttention()), protect=Protect(recent=1))
    assert policy.plan(shown(), 4).keep[0].nonzero()[:, 0].tolist() == [0, 3, 4, 5]


def test_eps_ranks_values_without_attention() -> None:
    look = replace(shown(), signal=torch.zeros(1, 6), budget=2)
    score = CriticalValues(AccumulatedAttention(), 0.0, 0.1).score(look, 0)
    assert score[0].tolist() == pytest.approx([0.1 * v for v in VALUES])


def test_norms_against_loops() -> None:
    """Two KV heads, two query heads each, D = 3, hidden size 5."""
    make = torch.Generator().manual_seed(0)
    values, maps = torch.randn(2, 4, 3, generator=make), torch.randn(4, 3, 5, generator=make)
    found = output_norms(values, maps)
    for g in range(2):
        for j in range(4):
            sums = [
                sum(abs(sum(float(values[g, j, d] * maps[h, d, o]) for d in range(3))) for o in range(5))
                for h in (2 * g, 2 * g + 1)
            ]
            assert float(found[g, j]) == pytest.approx(sum(sums) / 2, rel=1e-5)


def test_plans_are_those_of_the_plain_number_of_every_entry() -> None:
    for seed in range(20):
        make = torch.Generator().manual_seed(seed)
        attention = torch.rand(3, 200, generator=make) ** 4 * torch.tensor([[1.0], [0.3], [2.0]])
        values, maps = torch.randn(3, 200, 8, generator=make), torch.randn(6, 8, 30, generator=make)
        look = replace(view(values, values, signal=attention), outputs=lambda maps=maps: maps)
        first = keep_best(attention, look.valid, ~look.valid, torch.full((3,), 20))
        number = torch.where(first, 1e6 + attention, (attention + 1e-4) * output_norms(values, maps))
        for heads in (Uniform(), Ada(0.2)):
            plan = Policy(score=CriticalValues(AccumulatedAttention()), heads=heads).plan(look, 40)
            counts = heads.keep_counts(number, look.valid, ~look.valid, 40)
            assert torch.equal(plan.keep, keep_best(number, look.valid, ~look.valid, counts))


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt", "gpt_neox", "gemma2", "phi"])
def test_maps_make_the_model_s_own_output(name: str) -> None:
    """Rows of every head through its map, added up, are what the projection gives, but for its bias."""
    model = shared_model(name)
    with torch.no_grad(), mp.compress(model, "full") as cache:
        model(**one(5), cache=cache)
        for layer_cache in cache.layer_caches:
            assert layer_cache.attention.outputs is not None
            maps = layer_cache.attention.outputs()
            linear: Any = getattr(*ModelProfile.of(model).output_projections[layer_cache.index])
            heads = torch.randn(7, *maps.shape[:2], generator=torch.Generator().manual_seed(0))
            expected = linear(heads.flatten(1)) - linear(torch.zeros(1, heads[0].numel()))
            assert torch.allclose(torch.einsum("nhd,hdo->no", heads, maps), expected, atol=1e-5)
            assert maps.data_ptr() == linear.weight.data_ptr()  # nothing is copied


def test_against_the_model_s_own_attention_and_values() -> None:
    """The kept sets of h2o's score, from eager attention and captured values, worked entry by entry."""
    model, (ids, _) = llama("gqa"), prompts(1)
    n, budget = ids.shape[1], 14
    attention, captured = eager_attention_and_values(model, ids)
    with torch.no_grad(), mp.compress(model, "criticalkv", budget, score="h2o") as cache:
        model(ids, cache=cache)
        kept = [cache.positions(layer) for layer in (0, 1)]
    for layer in (0, 1):
        weight = model.model.layers[layer].self_attn.o_proj.weight.detach()
        for g in range(2):
            received = attention[layer][0, 4 * g : 4 * g + 4].mean(0).sum(0).tolist()
            v = captured[layer][:, 8 * g : 8 * g + 8]
            norms = [
                sum(float((weight[:, 8 * h : 8 * h + 8] @ v[j]).abs().sum()) for h in range(4 * g, 4 * g + 4)) / 4
                for j in range(n)
            ]
            safe = {0, 1, 2, 3, *range(n - 7, n)}
            rest = sorted(set(range(n)) - safe, key=lambda j: -received[j])
            chosen = rest[:1]  # half of the three that are left, rounded down
            rest = sorted(rest[1:], key=lambda j: -(received[j] + 1e-4) * norms[j])
            assert kept[layer][g] == sorted(safe | set(chosen) | set(rest[:2]))


def test_all_in_the_first_stage_is_the_score_alone() -> None:
    model, (ids, _) = llama("gqa"), prompts(1)
    found = []
    for method, options in (("h2o", {}), ("criticalkv", {"score": "h2o", "first": 1.0})):
        with torch.no_grad(), mp.compress(model, method, 16, **options) as cache:
            model(ids, cache=cache)
            found.append([cache.positions(layer) for layer in (0, 1)])
    assert found[0] == found[1]


def test_what_cannot_be_weighed_is_refused() -> None:
    with pytest.raises(OptionError, match="score='knorm' is not an amount of attention"):
        criticalkv(score="knorm")
    with pytest.raises(OptionError, match=r"first=1.5 must be 0 to 1"):
        criticalkv(first=1.5)
    with pytest.raises(OptionError, match=r"eps=-1.0 must be 0 to 1,000,000"):
        criticalkv(eps=-1.0)
    with pytest.raises(UnsupportedModelError, match="Net: the output projection of its attention was not found"):
        output_maps(None, 4, "Net")
    with pytest.raises(UnsupportedModelError, match="is a Identity, whose weights cannot be read"):
        output_maps(nn.Identity(), 4, "Net")
