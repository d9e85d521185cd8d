"""Elastic Cache: anchors and buckets by hand, the fixed place while decoding, and what may change neither."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import millpond as mp
from millpond.errors import BudgetError, OptionError, UnsupportedModelError
from millpond.kernels.args import AttentionShape
from millpond.methods import METHODS
from millpond.methods.elastic import nearest_in_text
from millpond.policy.view import View
from tests.helpers.hf.families import FAMILIES, shared_model, text
from tests.helpers.matrix.checks import CHECKS
from tests.helpers.matrix.hidden import equals_a_mask, kept_in_any_chunks
from tests.helpers.matrix.models import llama, prompts
from tests.helpers.papers.fixture import kept, make_layer_cache
from tests.matrix import test_invariance as matrix

elastic = METHODS.get("elastic")
BUDGET = 14
SETTINGS: dict[str, Any] = {"distance": -4, "grow": False}


@pytest.mark.parametrize("check", CHECKS)
def test_matrix(check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(matrix.METHODS, "elastic", SETTINGS)
    CHECKS[check]("elastic")


def test_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(matrix.METHODS, "elastic", SETTINGS)
    matrix.test_bytes_are_real_and_freed("elastic")


def view(scores: list[float], heads: int = 1) -> View:
    """Entries j with key (j, 1) and value (j^2, 1), and the importance that is given."""
    n = len(scores)
    j = torch.arange(n, dtype=torch.float64).expand(heads, -1)
    parts = {"keys": torch.stack([j, 1 + 0 * j], -1), "values": torch.stack([j * j, 1 + 0 * j], -1)}
    return View(
        j.int(), torch.tensor(scores).float().expand(heads, -1), n, layer=0, read_entries=lambda part: parts[part]
    )


def held(plan: Any) -> list[int]:
    return plan.keep[0].nonzero()[:, 0].tolist()


def test_anchors_by_hand() -> None:
    """Importance 9 1 5 2 8 .5 3 7, one sink, the newest stays, four are kept: 1, 3 go to 2 (ties left), 5, 6 to 4."""
    plan = elastic().plan(view([9, 1, 5, 2, 8, 0.5, 3, 7], heads=2), 4)
    assert held(plan) == [0, 2, 4, 7]
    assert (plan.keep[0] == plan.keep[1]).all()
    assert plan.caps.tolist() == [4, 4]
    for head in (0, 1):
        assert plan.merged.keys[head, [0, 2, 4, 7], 0].tolist() == [0, (1 + 2 + 3) / 3, (4 + 5 + 6) / 3, 7]
        expected = torch.tensor([0, (1 + 4 + 9) / 3, (16 + 25 + 36) / 3, 49], dtype=torch.float64)
        torch.testing.assert_close(plan.merged.values[head, [0, 2, 4, 7], 0], expected)
        torch.testing.assert_close(plan.merged.log_masses[head, [0, 2, 4, 7]].exp(), torch.tensor([1.0, 3, 3, 1]))


def test_ranks_by_hand() -> None:
    """The scores 9 1 8 2 7 3 6 4 5 0, with ends that stay whatever they are: right is the even ones.

    The order of the scores, taken for ranks, names the entries 0 3 4 5 6; it also keeps one less.
    """
    scores = [0, 9, 1, 8, 2, 7, 3, 6, 4, 5, 0, 0]
    assert held(elastic().plan(view(scores), 7)) == [0, 1, 3, 5, 7, 9, 11]
    # f = 12 - 8 = 4 as in the fixture, whose ends are shifted by the sink here
    assert held(elastic(official_code=True).plan(view(scores), 8)) == [0, 1, 4, 5, 6, 7, 11]


def test_the_official_code_merges_the_places_before() -> None:
    """Entries 2, 3, 8, 9, 10 leave; what the code takes in are 1, 2, 7, 8, 9, by distance to the anchors 1 4 5 6 7."""
    plan = elastic(official_code=True).plan(view([0, 9, 1, 8, 2, 7, 3, 6, 4, 5, 0, 0]), 8)
    expected = [0, (1 + 1 + 2) / 3, 4, 5, 6, (7 + 7 + 8 + 9) / 4, 11]
    assert plan.merged.keys[0, [0, 1, 4, 5, 6, 7, 11], 0].tolist() == pytest.approx(expected)
    assert plan.caps.tolist() == [8]
    everything = elastic(official_code=True).plan(view([3, 1, 2]), 3)
    assert held(everything) == [0, 1, 2]


def test_nearest_is_near_in_the_text() -> None:
    """Positions after an eviction have gaps: 9 is nearer to 12 than to 3; without an anchor nothing is taken in."""
    positions = torch.tensor([[0, 3, 9, 12, 13, -1], [0, 3, 9, 12, 13, -1]])
    anchors = torch.tensor([[False, True, False, True, False, False], [False] * 6])
    into, reachable = nearest_in_text(positions, anchors)
    assert into[0, :5].tolist() == [1, 1, 3, 3, 3]
    assert reachable.all(1).tolist() == [True, False]
    plan = elastic().plan(view([1, 2, 3, 4]), 2)
    assert held(plan) == [0, 3]
    assert plan.merged.keys[0, :, 0].tolist() == [0, 1, 2, 3]


def attend(cache: Any, n: int, begin: int = 0, seed: int = 0) -> None:
    """Random tokens begin..n-1: the first ones, up to 20, as a prompt, the others one by one."""
    make = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, 2, n, 4, generator=make, dtype=torch.float64) for _ in range(3))
    steps = [(begin, 20), *((t, t + 1) for t in range(20, n))] if begin < 20 else [(begin, n)]
    for a, b in steps:
        cache.attend(q[:, :, a:b], k[:, :, a:b], v[:, :, a:b], None, AttentionShape(1.0))


@pytest.mark.parametrize(("distance", "index"), [(-3, 7), (-1, 9), (4, 4), (30, 9), (-30, 0)])
def test_the_entry_at_a_fixed_place_leaves(distance: int, index: int) -> None:
    """What lies before the index stays, what lies behind it leaves oldest first; sinks stay, so does the newest."""
    cache = make_layer_cache(elastic(distance=distance), budget=10)
    attend(cache, 20)
    expected = kept(cache)
    assert len(expected) == 10
    make = torch.Generator().manual_seed(7)
    for t in range(20, 40):
        q, k, v = (torch.randn(1, 2, 1, 4, generator=make, dtype=torch.float64) for _ in range(3))
        cache.attend(q, k, v, None, AttentionShape(1.0))
        expected.append(t)
        del expected[max(index, 1)]  # one sink
        assert kept(cache, 0) == kept(cache, 1) == expected


def test_a_share_grows_with_the_text() -> None:
    """While decoding the cache holds the share of all tokens seen, within one; the older part of the prompt stays."""
    model, (ids, mask) = llama(), prompts(2)
    later = torch.randint(2, 96, (2, 30), generator=torch.Generator().manual_seed(2))
    for share in (0.8, 0.3):
        with torch.no_grad(), mp.compress(model, "elastic", share, distance=-4, page_slots=4) as cache:
            places = (mask.cumsum(1) - 1).clamp(min=0)
            model(ids, attention_mask=mask, position_ids=places, cache=cache)
            start = [cache.positions(1, s)[0] for s in (0, 1)]
            seen = mask
            for t in range(30):
                seen = torch.cat([seen, seen.new_ones(2, 1)], 1)
                at = (seen.cumsum(1) - 1)[:, -1:]
                model(later[:, t : t + 1], attention_mask=seen, position_ids=at, cache=cache)
                for s in (0, 1):
                    n = int(seen[s].sum())
                    for head in cache.positions(1, s):
                        assert len(head) == int(share * n + 0.5)
                        fixed = len(start[s]) - 4
                        assert head[:fixed] == start[s][:fixed]
                        assert head[-1] == n - 1
            cache.check_integrity()


def test_growth_can_be_left_out_and_drafts_follow_it() -> None:
    model, (ids, mask) = llama(), prompts(1)
    ids = ids[:, :8].repeat(1, 5)  # so that drafts are found
    for grow, most in ((True, 24), (False, 16)):
        found = []
        for options in ({}, {"prompt_lookup_num_tokens": 3}):
            with torch.no_grad(), mp.compress(model, "elastic", "40%", distance=-4, grow=grow) as cache:
                out = model.generate(
                    input_ids=ids, attention_mask=mask, max_new_tokens=20, do_sample=False, cache=cache, **options
                )
                found.append((out.tolist(), [cache.positions(layer) for layer in (0, 1)]))
                assert len(cache.positions(0)[0]) == most
        assert found[0] == found[1]


def test_merged_entries_against_a_plain_computation() -> None:
    """From the keys, values and attention of a stock pass: anchors, buckets and means, in float64."""
    model, (ids, _) = llama("gqa"), prompts(1)
    eager = llama("gqa")
    before = eager.config._attn_implementation
    eager.set_attn_implementation("eager")
    with torch.no_grad():
        out = eager(ids, output_attentions=True, use_cache=True)
    eager.set_attn_implementation(before)
    with torch.no_grad(), mp.compress(model, "elastic", BUDGET) as cache:
        model(ids, cache=cache)
        for layer, layer_cache in enumerate(cache.layer_caches):
            importance = out.attentions[layer][0].mean(0).sum(0)
            anchors = sorted(sorted(range(1, 39), key=lambda j: -float(importance[j]))[: BUDGET - 2])
            assert cache.positions(layer) == [[0, *anchors, 39]] * 2
            bucket: dict[int, list[int]] = {a: [a] for a in anchors}
            for j in range(1, 39):
                if j not in bucket:
                    bucket[min(anchors, key=lambda a: (abs(a - j), a))].append(j)
            dense, stock = layer_cache.read(0), out.cache.layers[layer]
            for found, whole in ((dense.keys, stock.keys), (dense.values, stock.values)):
                for place, a in enumerate(anchors, 1):
                    torch.testing.assert_close(found[:, place], whole[0][:, bucket[a]].mean(1), atol=1e-6, rtol=0)
                torch.testing.assert_close(found[:, 0], whole[0][:, 0])


def test_dropping_in_place_of_merging() -> None:
    model, (ids, _) = llama(), prompts(1)
    rows = {}
    for merge in ("mean", "none"):
        with torch.no_grad(), mp.compress(model, "elastic", BUDGET, merge=merge) as cache:
            model(ids, cache=cache)
            rows[merge] = (cache.positions(1), cache.layer_caches[1].read(0).keys)
        with torch.no_grad(), mp.compress(model, "full") as cache:
            model(ids, cache=cache)
            whole = cache.layer_caches[1].read(0).keys
    assert rows["mean"][0] == rows["none"][0]
    torch.testing.assert_close(rows["none"][1], whole[:, rows["none"][0][0]])
    assert not torch.allclose(rows["mean"][1], rows["none"][1])


def test_drop_equals_mask() -> None:
    model, (ids, mask) = llama("gqa"), prompts(2)
    with torch.no_grad(), mp.compress(model, "elastic", "40%", page_slots=4, merge="none", distance=-4) as cache:
        equals_a_mask(model, cache, ids, mask, 20)
        assert cache.stats().evicted > 0


def test_masses_make_equal_entries_count_in_full() -> None:
    """Buckets of equal keys and values: with mass_bias the attention is that of all of them, without it is not."""
    make = torch.Generator().manual_seed(5)
    block = torch.randn(1, 1, 6, 4, generator=make, dtype=torch.float64)
    k = block.repeat_interleave(5, 2)  # six runs of five equal entries
    last_q = torch.randn(1, 1, 1, 4, generator=make, dtype=torch.float64)
    exact = torch.softmax(torch.cat([last_q @ k.mT, last_q @ last_q.mT], -1), -1) @ torch.cat([k, last_q], 2)
    important = range(2, 30, 5)  # the middle of each run; the first and the newest entry stay anyway
    errors = {}
    for mass_bias in (True, False):
        policy = elastic(mass_bias=mass_bias)
        n = k.shape[2]
        j = torch.arange(n, dtype=torch.int32)[None]
        signal = torch.zeros(1, n).index_fill(1, torch.tensor(important), 1.0)
        plan = policy.plan(View(j, signal, n, layer=0, read_entries=lambda part: k[0]), 8)
        chosen = plan.keep[0].nonzero()[:, 0]
        logits = last_q[0] @ plan.merged.keys[:, chosen].mT
        if mass_bias:
            logits = logits + plan.merged.log_masses[:, chosen][:, None].double()
        rows = torch.cat([plan.merged.values[:, chosen], last_q[0]], 1)
        out = torch.softmax(torch.cat([logits, last_q[0] @ last_q[0].mT], -1), -1) @ rows
        errors[mass_bias] = float((out - exact[0]).abs().max())
    assert errors[True] < 1e-6 < 1e-2 < errors[False]


def test_a_later_turn_is_merged_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(matrix.METHODS, "elastic", {**SETTINGS, "mass_bias": True})
    matrix.test_second_turn("elastic", "gqa")
    matrix.test_batch_and_padding("elastic")
    model, (ids, _) = llama(), prompts(1)
    with torch.no_grad(), mp.compress(model, "elastic", BUDGET, mass_bias=True) as cache:
        model(ids[:, :25], cache=cache)
        model(ids[:, 25:], cache=cache)
        masses = cache.layer_caches[0].read(0).log_masses
        assert masses is not None
        torch.testing.assert_close(masses.exp().sum(1), torch.tensor([40.0, 40.0]))  # mass is conserved


@pytest.mark.parametrize("name", [f.name for f in FAMILIES if f.windows])
def test_windows(name: str) -> None:
    kept_in_any_chunks(shared_model(name), text(1, 30), 24, "elastic", budget=9, **SETTINGS)


def test_what_it_cannot_do_is_refused() -> None:
    with pytest.raises(OptionError, match="distance=0 would let each new token go at once"):
        elastic(distance=0)
    with pytest.raises(OptionError, match="their mass is undefined"):
        elastic(official_code=True, mass_bias=True)
    with pytest.raises(OptionError, match="mass_bias belongs to a policy that merges"):
        elastic(merge="none", mass_bias=True)
    with pytest.raises(BudgetError, match=r"budget 3 is smaller than sinks 3 \+ recent 1"):
        mp.compress(llama(), "elastic", 3, sinks=3)
    with pytest.raises(OptionError, match="score"):
        METHODS.get("ada")(score="elastic")
    with pytest.raises(OptionError, match="cannot be the score of another method"):
        METHODS.get("chunkkv")(score="elastic")
    model = shared_model("deepseek_v3")
    with torch.no_grad(), mp.compress(model, "elastic", 9) as cache, pytest.raises(UnsupportedModelError, match="MLA"):
        model(text(1, 20), cache=cache)
