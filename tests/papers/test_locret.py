"""Locret by hand: the official formula and loss, and the entries that stay, against thirty lines of plain Python."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from millpond.cache.layer.layer_cache import LayerCache
from millpond.errors import BudgetError, OptionError
from millpond.kernels.args import AttentionShape
from millpond.methods import METHODS
from millpond.policy.policy import Policy
from millpond.policy.protect import Protect
from millpond.policy.scores.attention import WindowAttention
from millpond.policy.scores.trained import Retained
from millpond.policy.trained.networks import QUANTILE_STEPS, LayerHeads, RetainingHeads, as_quantiles, quantiles_of
from millpond_lab.train.retain.features import labels_of
from millpond_lab.train.retain.train import retaining_loss
from tests.helpers.papers.fixture import make_layer_cache
from tests.helpers.papers.keyed import best, sets

locret = METHODS.get("locret")
WIDE = torch.linspace(-4, 4, QUANTILE_STEPS + 1)


def heads_of(q: int, kv: int, dim: int, width: int = 16, seed: int = 0) -> RetainingHeads:
    draw = torch.Generator().manual_seed(seed)
    w1, b1, w2, b2 = (
        torch.randn(*shape, generator=draw) for shape in ((width, (q + 2 * kv) * dim), (width,), (kv, width), (kv,))
    )
    return RetainingHeads([LayerHeads(w1 / 4, b1, w2 / 4, b2, WIDE.repeat(kv, 1))], "mark", "random")


def text(q: int = 4, kv: int = 2, n: int = 60, dim: int = 6, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    q_, k, v = (torch.randn(1, h, n, dim, generator=draw, dtype=torch.float64) for h in (q, kv, kv))
    return q_, k, v


def policy_of(heads: RetainingHeads, **options: Any) -> Policy:
    return locret(**options).with_heads(lambda named: heads)


def read(cache: LayerCache, q: Tensor, k: Tensor, v: Tensor, begin: int, end: int) -> None:
    cache.attend(q[:, :, begin:end], k[:, :, begin:end], v[:, :, begin:end], None, AttentionShape(1.0))


def plain_scores(heads: RetainingHeads, q: Tensor, k: Tensor, v: Tensor) -> list[list[float]]:
    """[KV head][token], number by number: W2 SiLU(W1 [q; k; v] + b1) + b2."""
    layer = heads.layers[0]
    found: list[list[float]] = [[] for _ in layer.b2]
    for t in range(q.shape[2]):
        x = [float(a) for part in (q, k, v) for head in part[0] for a in head[t].float()]
        hidden = [sum(float(w) * a for w, a in zip(row, x, strict=True)) for row in layer.w1]
        hidden = [h + float(b) for h, b in zip(hidden, layer.b1, strict=True)]
        active = [h / (1 + math.exp(-h)) for h in hidden]
        for head, (row, b) in enumerate(zip(layer.w2, layer.b2, strict=True)):
            found[head].append(sum(float(w) * a for w, a in zip(row, active, strict=True)) + float(b))
    return found


def plain_locret(score: list[float], n: int, budget: int, chunk: int, stabilizers: int, sinks: int, recent: int) -> Any:
    """Positions that stay after a prompt of n tokens, and the most that were held (Algorithm 1)."""
    held: list[int] = []
    most = 0
    for begin in range(0, n, chunk):
        held += range(begin, min(begin + chunk, n))
        most = max(most, len(held))
        last = begin + chunk >= n
        newest = recent if last else max(stabilizers, recent)
        always = {p for p in held if p < sinks or p >= held[-1] + 1 - newest}
        chosen = best([score[p] for p in held], budget, {i for i, p in enumerate(held) if p in always})
        held = [held[i] for i in chosen] if len(held) > budget else held
    return held, most


# ---------------------------------------------------------------------- scores


def test_the_score_by_hand() -> None:
    """One unit per part: SiLU(1 * 2 + 0.5) * 3 - 1 with SiLU(x) = x / (1 + e^-x)."""
    layer = LayerHeads(
        torch.tensor([[1.0, 0.0, 0.0]]), torch.tensor([0.5]), torch.tensor([[3.0]]), torch.tensor([-1.0]), WIDE[None]
    )
    expected = 3 * 2.5 / (1 + math.exp(-2.5)) - 1
    assert layer.raw(torch.tensor([[2.0, 9.0, 9.0]])).tolist() == [[pytest.approx(expected)]]


def test_scores_are_those_of_the_formula_and_lie_with_the_entries() -> None:
    heads, (q, k, v) = heads_of(4, 2, 6), text()
    cache = make_layer_cache(policy_of(heads, sinks=0, recent=0), 60)
    read(cache, q, k, v, 0, 60)
    plain = torch.tensor(plain_scores(heads, q, k, v))
    assert torch.allclose(cache.read(0).scores, as_quantiles(plain, heads.layers[0].quantiles), atol=2e-4)


def test_quantiles_change_no_order_and_make_heads_alike() -> None:
    raw = torch.randn(3, 5000, generator=torch.Generator().manual_seed(1)) * torch.tensor([[0.1], [3], [40]]) + 5
    found = as_quantiles(raw, quantiles_of(raw))
    assert torch.allclose(found.mean(1), torch.full((3,), 0.5), atol=0.01)
    for head in range(3):
        by_raw = found[head, raw[head].argsort()]
        assert (by_raw.diff() >= 0).all()
    beyond = as_quantiles(torch.tensor([[100.0, 200.0, -100.0, -200.0]]), quantiles_of(raw[:1]))[0].tolist()
    assert beyond[1] > beyond[0] > 1
    assert beyond[3] < beyond[2] < 0


# ---------------------------------------------------------------------- what stays


@pytest.mark.covering
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("passes", [[60], [7, 20, 33], [25, 35]])
def test_keep_sets_are_those_of_a_plain_computation(passes: list[int], seed: int) -> None:
    """Whole and in chunks of 16, whatever the passes of the prompt are; at most budget + chunk are held."""
    heads, (q, k, v) = heads_of(4, 2, 6, seed=seed), text(seed=seed)
    score = plain_scores(heads, q, k, v)
    for chunk, stabilizers in ((16, 6), (16, 0), (60, 0)):
        options = {"prefill": "chunks", "chunk": chunk, "stabilizers": stabilizers} if chunk < 60 else {}
        cache = make_layer_cache(policy_of(heads, sinks=2, recent=3, **options), 14, slots=1)
        cache.reading, begin = True, 0
        for n in passes:
            read(cache, q, k, v, begin, begin + n)
            begin += n
            if chunk < 60:
                assert int(cache.stored.max()) <= 14 + chunk
        cache.reading = False
        cache.run_plans()
        expected = [plain_locret(s, 60, 14, chunk, stabilizers, 2, 3) for s in score]
        assert sets(cache) == [kept for kept, _ in expected]
        assert all(most <= 14 + chunk for _, most in expected)


def test_the_papers_rule() -> None:
    """Absolute top-b with stabilizers in every chunk but the last, no sinks; what follows is kept."""
    heads, (q, k, v) = heads_of(4, 2, 6, seed=5), text(seed=5)
    cache = make_layer_cache(policy_of(heads, sinks=0, recent=0, prefill="chunks", chunk=20, stabilizers=5), 12)
    read(cache, q, k, v, 0, 55)
    for t in range(55, 60):
        read(cache, q, k, v, t, t + 1)
    score = plain_scores(heads, q, k, v)
    assert sets(cache) == [[*plain_locret(s, 55, 12, 20, 5, 0, 0)[0], *range(55, 60)] for s in score]


def test_evicting_at_each_step_drops_the_lowest_score() -> None:
    heads, (q, k, v) = heads_of(4, 2, 6, seed=2), text(seed=2)
    cache = make_layer_cache(policy_of(heads, sinks=1, recent=2, decode="evict"), 10)
    read(cache, q, k, v, 0, 30)
    for t in range(30, 60):
        read(cache, q, k, v, t, t + 1)
    for head, score in enumerate(plain_scores(heads, q, k, v)):
        held, _ = plain_locret(score, 30, 10, 30, 0, 1, 2)
        for t in range(30, 60):
            places = [*held, t]
            always = {i for i, p in enumerate(places) if p < 1 or p > t - 2}
            held = [places[i] for i in best([score[p] for p in places], 10, always)]
        assert sets(cache)[head] == held


def test_what_is_decoded_is_scored_for_a_later_turn() -> None:
    heads, (q, k, v) = heads_of(4, 2, 6, seed=3), text(seed=3)
    cache = make_layer_cache(policy_of(heads, sinks=0, recent=0), 60)
    read(cache, q, k, v, 0, 30)
    for t in range(30, 45):
        read(cache, q, k, v, t, t + 1)
    read(cache, q, k, v, 45, 60)
    whole = make_layer_cache(policy_of(heads, sinks=0, recent=0), 60)
    read(whole, q, k, v, 0, 60)
    assert torch.equal(cache.read(0).scores, whole.read(0).scores)
    assert (cache.read(0).scores[:, 30:45] != 0).all()


# ---------------------------------------------------------------------- heads that compete


def raised(heads: RetainingHeads, head: int, by: float) -> RetainingHeads:
    """The same with higher labels of one KV head, and quantiles that would not compare."""
    (layer,) = heads.layers
    b2 = layer.b2.clone()
    b2[head] += by
    quantiles = torch.stack([WIDE, WIDE * 5])
    return RetainingHeads([replace(layer, b2=b2, quantiles=quantiles)], heads.model, heads.name, heads.facts)


@pytest.mark.parametrize("by", [0.0, 0.7, 40.0])
@pytest.mark.parametrize("options", [{}, {"prefill": "chunks", "chunk": 60}])
def test_competing_heads_keep_the_best_entries_of_all(by: float, options: dict[str, Any]) -> None:
    """28 entries of two heads: the first 2 and newest 3 of each, and of the rest those with the highest raw scores."""
    heads, (q, k, v) = raised(heads_of(4, 2, 6, seed=4), 1, by), text(seed=4)
    cache = make_layer_cache(policy_of(heads, sinks=2, recent=3, compete="layer", **options), 14, slots=1)
    read(cache, q, k, v, 0, 60)
    rest = sorted(
        (s, head, t) for head, own in enumerate(plain_scores(heads, q, k, v)) for t, s in enumerate(own) if 2 <= t < 57
    )[-18:]
    expected = [sorted([0, 1, 57, 58, 59, *(t for _, h, t in rest if h == head)]) for head in range(2)]
    assert sets(cache) == expected
    if by == 40.0:
        assert [len(own) for own in expected] == [5, 23]


def test_without_competition_a_raised_head_keeps_no_more() -> None:
    heads, (q, k, v) = raised(heads_of(4, 2, 6, seed=4), 1, 40.0), text(seed=4)
    cache = make_layer_cache(policy_of(heads, sinks=2, recent=3), 14, slots=1)
    read(cache, q, k, v, 0, 60)
    assert [len(own) for own in sets(cache)] == [14, 14]


def test_heads_of_logits_do_not_compete() -> None:
    given = heads_of(4, 2, 6)
    heads = RetainingHeads(given.layers, given.model, given.name, {"label": "logit"})
    with pytest.raises(OptionError, match=r"trained with --label logit, .* do not compare"):
        policy_of(heads, compete="layer")
    assert policy_of(heads).entry_scores is heads


def test_layers_compete_in_one_plan_at_the_end_of_the_prompt() -> None:
    for options in ({"prefill": "chunks"}, {"decode": "evict"}):
        with pytest.raises(OptionError, match="layers cannot compete"):
            locret(compete="model", **options)


# ---------------------------------------------------------------------- the paper's training


def test_the_papers_label_and_loss() -> None:
    """max over later queries and the group of q k / sqrt d before the softmax; smooth L1 + 0.0025 sum of neighbours."""
    q, k, _ = text(n=12)
    shape = AttentionShape(6**-0.5)
    found = labels_of(q[0, :, 8:], k[0], shape, "logit")
    for head in range(2):
        for j in range(8):
            later = [float(q[0, h, i] @ k[0, head, j]) / 6**0.5 for h in (2 * head, 2 * head + 1) for i in range(8, 12)]
            assert float(found[head, j]) == pytest.approx(max(later), abs=1e-6)
    s, y = [torch.tensor([[0.0, 3.0, 1.0]])], [torch.tensor([[0.5, 1.0, 1.0]])]
    expected = (0.5 * 0.25 + 1.5 + 0) / 3 + 0.0025 * (9 + 4) / 2
    assert float(retaining_loss(s, y)) == pytest.approx(expected)
    assert float(retaining_loss(s * 2, y * 2)) == pytest.approx((0.5 * 0.25 + 1.5) / 3 + 0.0025 * (9 + 4))


# ---------------------------------------------------------------------- refusals


def test_scores_of_later_queries_are_refused_in_chunks() -> None:
    with pytest.raises(OptionError, match="made of later queries"):
        Policy(score=WindowAttention(window=4), every_step=False, prefill="chunks")
    with pytest.raises(OptionError, match="unknown option of snapkv 'prefill'"):
        METHODS.get("snapkv")(prefill="chunks")
    with pytest.raises(OptionError, match="evicts once cannot tell a chunk"):
        locret(prefill="chunks", decode="once")
    with pytest.raises(OptionError, match="chunk=0 must be 1 to 16,777,216"):
        locret(prefill="chunks", chunk=0)
    with pytest.raises(OptionError, match="prefill='once' or 'chunks'"):
        Policy(score=Retained(heads_of(1, 1, 2)), protect=Protect(grace=1), prefill="greedy")


def test_a_budget_below_what_stays_between_chunks_is_refused() -> None:
    policy = locret(prefill="chunks", stabilizers=40, recent=0)
    policy.check_budget(44)
    with pytest.raises(BudgetError, match="budget 43 is smaller than sinks 4"):
        policy.check_budget(43)
    locret(prefill="once", stabilizers=40, recent=0).check_budget(5)
