"""Random Attention: its rounds against a plain simulation, what the prompt's protection is worth, and the draws."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import millpond as mp
from millpond.errors import OptionError
from millpond.methods import METHODS
from millpond.policy.policy import Policy
from millpond.policy.protect import Protect
from millpond.policy.scores.attention import AccumulatedAttention
from millpond.policy.scores.draws import RandomRound, gumbel_top_k, uniform_draw
from millpond.policy.view import View
from tests.helpers.matrix.models import llama, prompts

random_attention = METHODS.get("random_attention")
SETTINGS: dict[str, Any] = {"recent": 4, "every": 3, "sinks": 2, "seed": 5}


def draw(layer: int, head: int, position: int, seen: int) -> float:
    """A number by plain whole numbers of 32 bits, as the documentation of the hash has them."""
    mask = 2**32 - 1
    layer_seed = (SETTINGS["seed"] * 1_000_003 + layer * 7919 + 1) & 0x7FFFFFFF
    h = (layer_seed * 0x27D4EB2F + seen * 0x165667B1 + 0x9E3779B9) & mask
    h = (h ^ h >> 16) * 0x7FEB352D & mask
    h = (h ^ h >> 15) * 0x846CA68B & mask
    seed = h ^ h >> 16
    h = (position * 0x9E3779B1 + head * 0x85EBCA77 + seed * 0xC2B2AE3D) & mask
    h = (h ^ h >> 16) * 0x7FEB352D & mask
    h = (h ^ h >> 15) * 0x846CA68B & mask
    return float((h ^ h >> 16) >> 8)


class Simulation:
    """One head as a list of positions: what each round keeps, worked from the paper's Section 2 and Equation 3."""

    def __init__(self, layer: int, head: int, budget: int, *, protects: bool = True) -> None:
        self.of, self.budget, self.protects = (layer, head), budget, protects
        self.kept: list[int] = []
        self.prompts: list[tuple[int, int]] = []

    def prompt(self, first: int, n: int) -> None:
        self.kept += range(first, first + n)
        self.prompts.append((first, first + n))
        self._round(first + n)

    def steps(self, first: int, n: int) -> None:
        for position in range(first, first + n):
            self.kept.append(position)
            if len(self.kept) >= self.budget + SETTINGS["every"]:
                self._round(position + 1)

    def _round(self, seen: int) -> None:
        if len(self.kept) <= self.budget:
            return
        safe = {p for p in self.kept if p < SETTINGS["sinks"] or p >= seen - SETTINGS["recent"]}
        room = self.budget - SETTINGS["sinks"] - SETTINGS["recent"]
        for begin, end in reversed(self.prompts) if self.protects else ():
            if end - begin < room:
                room -= end - begin
                safe |= {p for p in self.kept if begin <= p < end}
        others = sorted(set(self.kept) - safe, key=lambda p: -draw(*self.of, p, seen))
        self.kept = sorted([*safe, *others[: self.budget - len(safe)]])


def kept(budget: int, passes: list[tuple[bool, int]], **options: Any) -> list[list[list[int]]]:
    """Positions [layer][head] after passes of (is a prompt, tokens)."""
    model, tokens = llama("gqa"), torch.randint(2, 90, (1, 200), generator=torch.Generator().manual_seed(1))
    at = 0
    with torch.no_grad(), mp.compress(model, "random_attention", budget, **SETTINGS | options) as cache:
        for is_prompt, n in passes:
            for part in tokens[:, at : at + n].split(n if is_prompt else 1, 1):
                model(part, cache=cache)
            at += n
        cache.check_integrity()
        return [cache.positions(layer) for layer in (0, 1)]


@pytest.mark.parametrize(
    ("passes", "protects"),
    [
        ([(True, 12), (False, 22)], True),  # the prompt fits
        ([(True, 12), (False, 16)], False),  # and is not protected
        ([(True, 40), (False, 8)], True),  # it does not, and is drawn from at its end
        ([(True, 9), (False, 12), (True, 6), (False, 8)], True),  # both turns fit
        ([(True, 15), (False, 5), (True, 12), (False, 8)], True),  # the newer one alone fits
    ],
)
def test_kept_positions_are_those_of_a_plain_simulation(passes: list[tuple[bool, int]], protects: bool) -> None:
    found = kept(24, passes, prompt=protects)
    for layer in (0, 1):
        for head in (0, 1):
            plain, at = Simulation(layer, head, 24, protects=protects), 0
            for is_prompt, n in passes:
                (plain.prompt if is_prompt else plain.steps)(at, n)
                at += n
            assert found[layer][head] == plain.kept
    assert found[0][0] != found[0][1] != found[1][1], "each head draws for itself"


def test_the_prompt_stays_for_as_long_as_it_fits() -> None:
    found = kept(24, [(True, 12), (False, 30)])
    assert all(set(range(12)) <= set(head) for layer in found for head in layer)
    assert all(len(head) < 24 + SETTINGS["every"] for layer in found for head in layer)


def look(seen: int, n: int = 4000, heads: int = 2) -> View:
    return View(torch.arange(n, dtype=torch.int32).expand(heads, -1), None, seen, layer=0)


def test_draws_are_uniform_and_new_in_each_round_and_head() -> None:
    draws = torch.stack([uniform_draw(7, look(seen)) for seen in range(100, 108)]).flatten(0, 1).double()
    assert 0 < draws.min() < 0.001 < 0.999 < draws.max() < 1
    assert (draws.mean(1) - 0.5).abs().max() < 0.02
    correlation = torch.corrcoef(draws) - torch.eye(len(draws))
    assert correlation.abs().max() < 0.07  # 4 of 1 / sqrt(4000)
    later = torch.corrcoef(torch.stack([draws[0, 1:], draws[2, :-1]]))[0, 1]
    assert abs(float(later)) < 0.07, "a round is not the round before, one position later"


def test_old_entries_die_as_the_paper_says() -> None:
    """Of K = 40 places, r = 10: a token lives through m rounds with (40 / 50) ** m."""
    policy = random_attention(recent=10, every=10, sinks=0, prompt=False)
    alive = torch.arange(50, dtype=torch.int32).expand(400, -1)
    for number in range(1, 5):
        seen = 40 + 10 * number
        keep = policy.plan(View(alive, None, seen, layer=0), 50).keep if alive.shape[1] > 50 else alive >= 0
        alive = alive[keep].view(400, -1)
        assert abs(float((alive < 40).sum(1).float().mean()) / 40 - 0.8 ** (number - 1)) < 0.03
        alive = torch.cat([alive, torch.arange(seen, seen + 10, dtype=torch.int32).expand(400, -1)], 1)


def test_gumbel_top_k_samples_by_weight() -> None:
    """Weights 1, 2, 4, 0: the first two draws of 4,000 heads against their probabilities."""
    weights, n = torch.tensor([1.0, 2.0, 4.0, 0.0]), 4000
    order = gumbel_top_k(weights.log().expand(n, -1), 3, look(9, 4, n)).argsort(1, descending=True)
    assert bool((order[:, 3] == 3).all()), "what weighs nothing comes last"
    for a in range(3):
        for b in {0, 1, 2} - {a}:
            share = float(((order[:, 0] == a) & (order[:, 1] == b)).float().mean())
            assert abs(share - float(weights[a] / 7 * weights[b] / (7 - weights[a]))) < 0.025


def test_a_batch_and_a_copy_draw_alike() -> None:
    model, (ids, mask) = llama("gqa"), prompts(2)
    settings = SETTINGS | {"recent": 2}
    found = []
    for rows in ([0, 1], [0], [1]):
        own = ids[rows][:, mask[rows].any(0)], mask[rows][:, mask[rows].any(0)]
        with torch.no_grad(), mp.compress(model, "random_attention", 14, **settings) as cache:
            model.generate(input_ids=own[0], attention_mask=own[1], max_new_tokens=12, do_sample=False, cache=cache)
            found.append([[cache.positions(layer, s) for layer in (0, 1)] for s in range(len(rows))])
    assert found[0] == [*found[1], *found[2]]


def test_what_cannot_protect_a_prompt_is_refused() -> None:
    with pytest.raises(OptionError, match="a prompt is protected by plans"):
        Policy(score=AccumulatedAttention(), protect=Protect(prompt=True))
    with pytest.raises(OptionError, match="use prefill='once'"):
        Policy(score=RandomRound(), protect=Protect(prompt=True), prefill="chunks")
    with pytest.raises(OptionError, match="every=0"):
        random_attention(every=0)
