"""DuoAttention: which heads are retrieval heads, what each kind keeps, exact totals over heads and layers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

import millpond as mp
from millpond.errors import CacheMismatchError, OptionError
from millpond.methods import METHODS
from millpond.methods.duo_attention import DividedHeads, RetrievalHeads, RetrievalLayers, distribute
from millpond.policy.layer_allocation import split_budget
from millpond.policy.view import View
from tests.helpers.examples import examples
from tests.helpers.hf.eager import eager_attention
from tests.helpers.hf.families import one, shared_model
from tests.helpers.matrix.checks import CHECKS
from tests.helpers.matrix.hidden import equals_a_mask
from tests.helpers.matrix.models import llama, prompts
from tests.matrix import test_invariance as matrix

duo_attention = METHODS.get("duo_attention")
SINKS, RECENT, BUDGET, STEPS = 2, 4, 14, 10
NEAR = {"sinks": SINKS, "recent": RECENT, "score": "h2o"}


def table(path: Path, rows: Any) -> str:
    path = path / "heads.json"
    path.write_text(json.dumps(rows))
    return str(path)


def steps(model: Any, method: str, batch: int = 2, **options: Any) -> list[list[list[list[list[int]]]]]:
    """Positions kept [step][layer][sequence][head], after the prompt and after each step behind it."""
    ids, mask = prompts(batch)
    later = torch.randint(2, 96, (batch, STEPS), generator=torch.Generator().manual_seed(2))
    kept = []
    with torch.no_grad(), mp.compress(model, method, BUDGET, page_slots=4, **options) as cache:
        for t in range(STEPS + 1):
            step = ids if t == 0 else later[:, t - 1 : t]
            seen = torch.cat([mask, torch.ones(batch, t, dtype=mask.dtype)], 1)
            places = (seen.cumsum(1) - 1).clamp(min=0)[:, -step.shape[1] :]
            model(step, cache=cache, attention_mask=seen, position_ids=places)
            kept.append([[cache.positions(layer, s) for s in range(batch)] for layer in range(len(cache.layers))])
        cache.check_integrity()
    return kept


def test_the_share_of_attention_that_goes_far() -> None:
    """Near are the first position and the last two; head 0 looks far with 0.2 of 1, head 1 with 0.6 of 1.2."""
    signal = torch.tensor([[0.5, 0.1, 0.1, 0.2, 0.1], [0.2, 0.6, 0.2, 0.2, 9.0]])
    positions = torch.tensor([[0, 1, 2, 3, 4], [0, 1, 3, 4, -1]], dtype=torch.int32)
    view = View(positions, signal, seen=5, layer=0)
    for threshold, expected in ((0.19, [1, 1]), (0.2001, [0, 1]), (0.49, [0, 1]), (0.51, [0, 0])):
        assert RetrievalHeads(threshold, sinks=1, recent=2).retrieval(view).tolist() == expected


@pytest.mark.parametrize(
    ("retrieval", "entries", "budget", "expected"),
    [
        ((True, False, False), [30, 30, 30], 10, [18, 6, 6]),
        ((True, False, True), [30, 30, 30], 10, [12, 6, 12]),
        ((True, False, True), [30, 30, 30], 11, [14, 6, 13]),  # 27 for two
        ((False, False, False), [30, 30, 30], 10, [10, 10, 10]),
        ((True, True, True), [30, 30, 30], 10, [10, 10, 10]),
        ((True, False, False), [20, 20, 20], 16, [20, 14, 14]),  # what it cannot use comes back
        ((True, False, False), [9, 9, 9], 10, [9, 9, 9]),
        ((True, False, True), [12, 6, 30], 10, [12, 6, 12]),
        ((True, False, True), [8, 6, 30], 10, [8, 6, 16]),
        ((True, False, False), [30, 30, 30], 6, [6, 6, 6]),
    ],
)
def test_counts_by_hand(retrieval: tuple[bool, ...], entries: list[int], budget: int, expected: list[int]) -> None:
    """Two sinks and four newest are protected."""
    place = torch.arange(30)[None]
    valid = place < torch.tensor(entries)[:, None]
    pinned = valid & ((place < 2) | (place >= torch.tensor(entries)[:, None] - 4))
    assert DividedHeads(retrieval).keep_counts(torch.zeros(3, 30), valid, pinned, budget).tolist() == expected


@settings(max_examples=examples(60))
@given(
    shares=st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=1, max_size=6),
    budget=st.integers(6, 60),
    length=st.integers(10, 80),
)
def test_layers_share_exactly_and_heads_alike(shares: list[float], budget: int, length: int) -> None:
    """The total is exact; while retrieval heads have room, one gets as much as another in any layer."""
    n, least = len(shares), 6
    found = split_budget(RetrievalLayers(tuple(shares)), budget, least, [length] * n)
    assert sum(found) == n * budget
    if budget >= length:
        return
    rest = (budget - least) * n
    if sum(shares) and rest <= sum(shares) * (length - least):
        for number, share in zip(found, shares, strict=True):
            assert abs(number - least - share * rest / sum(shares)) <= 1
    assert sum(distribute(float(rest), shares, [length - least] * n)) == pytest.approx(
        min(rest, sum(shares) * (length - least))
    )


@pytest.mark.parametrize("decode", ["grow", "evict"])
def test_what_each_head_keeps(decode: str, tmp_path: Path) -> None:
    """Four layers with two, one, one and no retrieval heads: 4 x 28 entries, 6 for each of four streaming heads."""
    rows = [[1, 0.9], [0.2, 0.6], [1, 0], [0, 0.5]]
    model = llama("gqa", layers=4)
    kept = steps(model, "duo_attention", heads=table(tmp_path, rows), across=True, decode=decode, **NEAR)
    for t, layers in enumerate(kept):
        total = [0, 0]
        for layer, row in enumerate(rows):
            for s, n in ((0, 40 + t), (1, 33 + t)):
                for h, number in enumerate(row):
                    head, is_retrieval = layers[layer][s][h], number > 0.5
                    assert {0, 1, *range(n - RECENT, n)} <= set(head)
                    total[s] += len(head)
                    if not is_retrieval:
                        assert len(head) == SINKS + RECENT
                    elif decode == "grow":  # 22 of the prompt, and all that came since
                        assert len(head) == 22 + t
                        assert set(range(n - t, n)) <= set(head)
                    else:
                        assert len(head) == 22
        assert total == [8 * BUDGET + (4 * t if decode == "grow" else 0)] * 2


def test_retrieval_heads_keep_everything_where_it_fits(tmp_path: Path) -> None:
    """Of 34 positions streaming heads keep 6, and the budget of 20 holds the retrieval heads whole."""
    model = llama("gqa")
    with torch.no_grad(), mp.compress(model, "duo_attention", 20, heads=table(tmp_path, [[1, 0]] * 2), **NEAR) as cache:
        model(prompts(1, length=34)[0], cache=cache)
        for layer in (0, 1):
            assert cache.positions(layer) == [list(range(34)), [0, 1, 30, 31, 32, 33]]


@pytest.mark.parametrize("chunk", [None, 16])
def test_a_profile_is_the_model_s_own_attention(chunk: int | None) -> None:
    """Heads by their last four queries, one by one; chunks are planned together where the cache was told so."""
    model, (ids, _) = llama(layers=3), prompts(1, length=60)
    far = far_shares(model, ids, 4)
    flat = sorted(x for row in far for x in row)
    threshold = (flat[2] + flat[3]) / 2
    options = {"sinks": SINKS, "recent": RECENT, "score": "snapkv/window=4/kernel=3", "threshold": threshold}
    options |= {"between_chunks": chunk is None, "across": True}
    with torch.no_grad(), mp.compress(model, "duo_attention", BUDGET, **options) as cache:
        for part in ids.split(chunk or 60, 1):
            model(part, cache=cache)
        assert sum(int(layer_cache.stored.sum()) for layer_cache in cache.layer_caches) == 3 * 2 * (
            60 if chunk else BUDGET
        )
        model(ids[:, :1], cache=cache)
        lengths = [[len([p for p in head if p < 60]) for head in cache.positions(layer)] for layer in range(3)]
    assert sum(map(sum, lengths)) + 3 == 3 * 2 * BUDGET
    for layer, row in enumerate(far):
        for h, x in enumerate(row):
            if x > threshold:
                assert abs(lengths[layer][h] - (6 * BUDGET - 3 * 6) / 3) <= 1
            else:  # the step behind the prompt took the place of the oldest that was near
                assert lengths[layer][h] == SINKS + RECENT - 1


def test_a_profile_of_each_layer_alone() -> None:
    """Planned with the prompt: as many entries in every layer, more in its retrieval heads."""
    model, (ids, _) = llama(layers=3), prompts(1, length=60)
    far = far_shares(model, ids, 4)
    threshold = sum(map(sum, far)) / 6
    options = {"sinks": SINKS, "recent": RECENT, "score": "snapkv/window=4/kernel=3", "threshold": threshold}
    with torch.no_grad(), mp.compress(model, "duo_attention", BUDGET, **options) as cache:
        model(ids, cache=cache)
        for layer, row in enumerate(far):
            lengths = [len(head) for head in cache.positions(layer)]
            kinds = [x > threshold for x in row]
            assert lengths == ([BUDGET] * 2 if kinds[0] == kinds[1] else [22 if kind else 6 for kind in kinds])
    assert any(row[0] > threshold > row[1] or row[1] > threshold > row[0] for row in far)


def far_shares(model: Any, ids: Tensor, window: int) -> list[list[float]]:
    """Of each layer and KV head, from transformers' own attention."""
    attentions = eager_attention(model, ids)
    n = ids.shape[1]
    return [p[0, :, -window:, SINKS : n - RECENT].sum(-1).mean(-1).view(2, -1).mean(1).tolist() for p in attentions]


@pytest.mark.covering
@pytest.mark.parametrize("check", [check for check in CHECKS if check != "sizes"])
@pytest.mark.parametrize("profiled", [False, True])
def test_matrix(profiled: bool, check: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the other methods; its heads differ in size, which `test_what_each_head_keeps` checks."""
    kind = {"threshold": 0.775} if profiled else {"heads": table(tmp_path, [[1, 0], [0, 1]])}
    options = {**kind, "decode": "evict", **NEAR}
    monkeypatch.setitem(matrix.METHODS, "duo_attention", options)
    run: Callable[..., None] = CHECKS[check]
    run("duo_attention")


@pytest.mark.parametrize("decode", ["grow", "evict"])
def test_drop_equals_mask(decode: str, tmp_path: Path) -> None:
    model, (ids, mask) = llama("gqa"), prompts(2)
    options = {"heads": table(tmp_path, [[1, 0], [0, 0]]), "decode": decode, **NEAR}
    with torch.no_grad(), mp.compress(model, "duo_attention", BUDGET, page_slots=4, **options) as cache:
        equals_a_mask(model, cache, ids, mask, 10)


@pytest.mark.parametrize("decode", ["grow", "evict"])
@pytest.mark.parametrize("name", ["gemma3", "gpt_oss", "mistral"])
def test_sliding_layers(name: str, decode: str) -> None:
    """Profiled on random models whose layers see 12 positions; what a window hides is not held."""
    model, ids = shared_model(name), one(40)["input_ids"]
    options = {"sinks": 1, "recent": 3, "score": "h2o", "decode": decode, "threshold": 0.3, "across": decode == "grow"}
    with torch.no_grad(), mp.compress(model, "duo_attention", 9, **options) as cache:
        for part in (ids[:, :30], *ids[:, 30:].split(1, 1)):
            assert model(part, cache=cache).logits.isfinite().all()
        for layer_cache in cache.layer_caches:
            if cache.layer_caches[layer_cache.index].attention.shape.window:
                assert int(layer_cache.stored.max()) <= 12
        cache.check_integrity()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threshold": 1.5}, r"threshold=1.5 must be 0 to 1"),
        ({"score": "window"}, "watches no attention"),
        ({"score": "h2o/prefill=greedy"}, "leave out prefill=greedy"),
        ({"score": "rkv", "decode": "evict"}, "plans at each step"),
        ({"score": "tova"}, "shared by all heads"),
        ({"heads": "/none.json"}, "cannot be read as JSON"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        duo_attention(**options)


@pytest.mark.parametrize("rows", [{}, [], [[]], [["a"]], [1, 2]])
def test_what_is_no_table_is_refused(rows: Any, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="must be a list of layers"):
        duo_attention(heads=table(tmp_path, rows))


def test_tables_of_other_models_are_refused(tmp_path: Path) -> None:
    model, (ids, _) = llama("gqa"), prompts(1)
    with pytest.raises(OptionError, match="head classes for 3 layers; the model has 2"):
        mp.compress(model, "duo_attention", BUDGET, heads=table(tmp_path, [[1, 0]] * 3), **NEAR)
    with pytest.raises(OptionError, match="retrieval heads for 3 layers; the model has 2"):
        mp.compress(model, "duo_attention", BUDGET, heads=table(tmp_path, [[1, 0]] * 3), across=True, **NEAR)
    with (
        torch.no_grad(),
        mp.compress(model, "duo_attention", BUDGET, heads=table(tmp_path, [[1, 0, 0]] * 2), **NEAR) as cache,
        pytest.raises(CacheMismatchError, match="layer 0 has 2 KV heads, the table of head classes has 3 there"),
    ):
        model(ids, cache=cache)


def test_keys_alone_can_choose_where_a_table_parts_the_heads(tmp_path: Path) -> None:
    model, (ids, _) = llama("gqa"), prompts(1)
    options = {"heads": table(tmp_path, [[1, 0]] * 2), "score": "keydiff", "sinks": 1, "recent": 3}
    with torch.no_grad(), mp.compress(model, "duo_attention", BUDGET, **options) as cache:
        model(ids, cache=cache)
        assert [len(head) for head in cache.positions(0)] == [24, 4]
