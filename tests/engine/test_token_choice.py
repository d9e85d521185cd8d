"""Draws against plain references and against transformers' own warpers, token by token of the distribution."""

from __future__ import annotations

import math
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from millpond.engine.sampling import token_choice
from millpond.engine.sampling.token_choice import CANDIDATES, TokenChoice, choose, draw_key

POINTS = 1000


def choice_of(
    rows: int, temperature: float, top_k: int, top_p: float, min_p: float, keys: Tensor, typical_p: float = 1.0
) -> TokenChoice:
    return TokenChoice(
        torch.full((rows,), temperature),
        torch.full((rows,), top_k),
        torch.full((rows,), top_p, dtype=torch.float64),
        torch.full((rows,), min_p),
        torch.full((rows,), typical_p, dtype=torch.float64),
        keys,
    )


def evenly(weights: Tensor, keys: Tensor, ids: Tensor | None = None) -> Tensor:
    """In place of a race: the token in which a share (key + 1/2) / POINTS of the row's weight is reached."""
    ends = weights.double().cumsum(-1)
    return torch.searchsorted(ends, (keys[:, None] + 0.5) / POINTS * ends[:, -1:], right=True)[:, 0]


def shares(
    logits: Tensor,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    typical_p: float = 1.0,
) -> Tensor:
    """The distribution (V,) that draws follow: drawn at evenly spaced points, so right to 1 / POINTS per token."""
    with patch.object(token_choice, "race", evenly):
        choice = choice_of(POINTS, temperature, top_k, top_p, min_p, torch.arange(POINTS), typical_p)
        tokens = choose(logits.expand(POINTS, -1), choice)
    return tokens.bincount(minlength=len(logits)).double() / POINTS


def of_transformers(
    logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float, typical_p: float = 1.0
) -> Tensor:
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    if min_p:
        warpers.append(MinPLogitsWarper(min_p))
    if typical_p < 1:
        warpers.append(TypicalLogitsWarper(typical_p))
    ids = torch.zeros(1, 1, dtype=torch.long)
    return warpers(ids, logits[None].clone())[0].double().softmax(-1)


@pytest.mark.covering
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, 0, 1.0, 0.0),
        (0.3, 0, 1.0, 0.0),
        (3.0, 7, 1.0, 0.0),
        (1.0, 0, 0.9, 0.0),
        (1.0, 0, 1.0, 0.1),
        (0.8, 50, 0.9, 0.02),
        (1.5, 400, 0.5, 0.0),
        (2.0, 0, 0.99, 0.0),
        (1.0, 1, 1.0, 0.0),
        (1.0, 10_000, 0.7, 0.0),
    ],
)
@pytest.mark.parametrize("size", [40, CANDIDATES, 700])
@pytest.mark.parametrize("scale", [0.3, 3.0])
def test_the_distribution_is_transformers(
    temperature: float, top_k: int, top_p: float, min_p: float, size: int, scale: float
) -> None:
    logits = scale * torch.randn(size, generator=torch.Generator().manual_seed(size))
    ours, theirs = (f(logits, temperature, top_k, top_p, min_p) for f in (shares, of_transformers))
    assert (ours - theirs).abs().max() <= 1.01 / POINTS + 1e-6
    assert not ours[theirs == 0].any()


@pytest.mark.covering
@pytest.mark.parametrize("typical_p", [0.05, 0.3, 0.9, 0.999])
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [(1.0, 0, 1.0, 0.0), (0.4, 0, 1.0, 0.0), (2.5, 30, 1.0, 0.0), (1.0, 300, 0.8, 0.0), (0.9, 0, 0.95, 0.05)],
)
@pytest.mark.parametrize("size", [40, CANDIDATES, 700])
@pytest.mark.parametrize("scale", [0.3, 3.0])
def test_typical_sampling_is_transformers(
    temperature: float, top_k: int, top_p: float, min_p: float, typical_p: float, size: int, scale: float
) -> None:
    logits = scale * torch.randn(size, generator=torch.Generator().manual_seed(size))
    ours, theirs = (f(logits, temperature, top_k, top_p, min_p, typical_p) for f in (shares, of_transformers))
    assert (ours - theirs).abs().max() <= 1.01 / POINTS + 1e-6
    assert not ours[theirs == 0].any()


def test_typical_sampling_leaves_out_what_is_too_likely() -> None:
    """p = 0.4 and six of 0.1: H = 1.75 nats, the likeliest is 0.83 away from it and the others 0.56."""
    ours = shares(torch.tensor([0.4] + [0.1] * 6).log(), typical_p=0.3)
    assert ours.tolist() == pytest.approx([0.0] + [1 / 6] * 6, abs=2 / POINTS)


def plain(logits: list[float], top_k: int, top_p: float, min_p: float) -> set[int]:
    """Which tokens may be drawn, by the words of the documentation."""
    weights = [math.exp(x - max(logits)) for x in logits]
    order = sorted(range(len(logits)), key=lambda i: -weights[i])
    kept = [i for i in order if weights[i] >= weights[order[min(top_k, len(order)) - 1]]] if top_k else order
    mass, need = 0.0, []
    for i in kept:
        if mass < top_p * sum(weights[j] for j in kept) - 1e-9 or top_p == 1 or weights[i] == weights[need[-1]]:
            need.append(i)
            mass += weights[i]
    return {i for i in need if weights[i] >= min_p}


@given(
    # quarters: sums of their exponentials never lie as near to the limits below as rounding reaches
    logits=st.lists(st.integers(-8, 8).map(lambda x: x / 4), min_size=1, max_size=12),
    top_k=st.integers(0, 14),
    top_p=st.sampled_from([0.111, 0.437, 0.763, 0.951, 1.0]),
    min_p=st.sampled_from([0.0, 0.0701, 0.511, 1.0]),
)
def test_what_is_left_to_choose_from(logits: list[float], top_k: int, top_p: float, min_p: float) -> None:
    ours = shares(torch.tensor(logits), top_k=top_k, top_p=top_p, min_p=min_p)
    assert set(ours.nonzero()[:, 0].tolist()) == plain(logits, top_k, top_p, min_p)


def test_ties_beyond_the_short_cut_stay() -> None:
    """A thousand equal tokens: the five likeliest are as likely as all the others, wherever they stand."""
    ours = shares(torch.zeros(1000), top_k=5)
    assert int((ours > 0).sum()) == 1000


@given(seed=st.integers(0, 10**6), rows=st.integers(1, 9), size=st.sampled_from([3, 100, 300, 1000]))
def test_a_row_does_not_depend_on_the_others(seed: int, rows: int, size: int) -> None:
    g = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(rows, size, generator=g)
    choice = TokenChoice(
        torch.rand(rows, generator=g) + 0.1,
        torch.randint(0, 400, (rows,), generator=g),
        torch.rand(rows, generator=g, dtype=torch.float64).clamp(0.05),
        torch.rand(rows, generator=g) ** 8,
        (2 * torch.rand(rows, generator=g, dtype=torch.float64)).clamp(0.05, 1.0),
        torch.randint(-(2**63), 2**63 - 1, (rows,), generator=g),
    )
    together = choose(logits, choice)
    alone = [choose(logits[i : i + 1], choice[torch.tensor([i])]).item() for i in range(rows)]
    assert together.tolist() == alone


def test_the_coldest_temperature_takes_the_likeliest() -> None:
    logits = torch.tensor([1.0, 1.001, -1e30, float("-inf")])
    assert shares(logits, temperature=1e-45).tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize("top_k", [0, 10, 40])
def test_a_token_without_probability_is_never_drawn(top_k: int) -> None:
    logits = torch.full((50,), float("-inf"))
    logits[20:30] = 0.0
    keys = torch.tensor([draw_key(0, 0, step) for step in range(200)])
    assert set(choose(logits.expand(200, -1), choice_of(200, 1.0, top_k, 1.0, 0.0, keys)).tolist()) == {*range(20, 30)}


@pytest.mark.parametrize("limits", [(5, 1.0, 0.0), (0, 0.9, 0.0), (300, 1.0, 0.0), (0, 1.0, 0.05), (300, 0.7, 0.01)])
def test_limits_take_no_draw_from_a_token_that_stays(limits: tuple[int, float, float]) -> None:
    """Where the token drawn without limits is one that stays, it is drawn with them: each has a number of its own."""
    logits = 2 * torch.randn(700, generator=torch.Generator().manual_seed(1)).expand(300, -1)
    keys = torch.tensor([draw_key(seed, 0, 0) for seed in range(300)])
    free, limited = (choose(logits, choice_of(300, 1.0, *some, keys)) for some in ((0, 1.0, 0.0), limits))
    stays = shares(logits[0], 1.0, *limits) > 0
    assert 50 < int(stays[free].sum()) < 300
    assert torch.equal(limited[stays[free]], free[stays[free]])


def test_keys_depend_on_seed_completion_and_step() -> None:
    keys = [draw_key(seed, index, step) for seed in (-1, 0, 2**80) for index in range(9) for step in range(99)]
    assert len(set(keys)) == len(keys)
    assert min(keys) >= -(2**63)
    assert max(keys) < 2**63
