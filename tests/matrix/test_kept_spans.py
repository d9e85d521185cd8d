"""Spans that stay: every method holds them in every head of every layer, and drops the rest as it says."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

import millpond as mp
from millpond.cache.state.span_marks import KeptSpans
from millpond.errors import BudgetError, CacheMismatchError, OptionError
from millpond.methods import METHODS
from tests.helpers.hf.families import family
from tests.helpers.matrix.hidden import Mask, equals_a_mask, passes, steps_after
from tests.helpers.matrix.models import llama, prompts
from tests.helpers.matrix.oracle import Oracle, Rule
from tests.helpers.random_heads import random_heads_where_none_are

SPANS = ((3, 9), (14, 17))
KEPT = {position for begin, end in SPANS for position in range(begin, end)}
#: Options that let a method run on a tiny model without a tokenizer, with a prompt of 72 tokens.
OPTIONS: dict[str, dict[str, Any]] = {
    "fastgen": {"special": "1", "punctuation": "5;6;7"},
    "kvzip": {"ask": "none"},
    "attention_matching": {"ask": "none"},
    "streaming": {"positions": "absolute"},
    **{name: {"window": 4} for name in ("cake", "defensivekv", "dms", "finch", "lava", "rkv", "snapkv", "vase")},
    "ems": {"window": 4},
    "random_attention": {"recent": 4},
    "duo_attention": {"recent": 4},
    "simlayerkv": {"recent": 4},
    "pyramidkv": {"score": "snapkv/window=4"},
    "chunkkv": {"score": "snapkv/window=4"},
    "criticalkv": {"score": "snapkv/window=4"},
    "layer_table": {"score": "snapkv/window=4"},
    "ada": {"score": "snapkv/window=4"},
    "lagkv": {"lag": 4},
    "merge_on_evict": {"score": "snapkv/window=4"},
}
MERGING = ("cam", "d2o", "elastic", "ems", "kvmerger", "merge_on_evict")
ALL = [name for name in mp.list_methods() if name != "infllm"]
#: One of each way in which a method holds its budget: by the kernel, a plan at each step, rules of heads, merging.
COVERING = ("h2o", "tova", "snapkv", "streaming", "pyramidkv", "keydiff", "fastgen", "elastic", "cam", "kvzip", "full")


@pytest.fixture(autouse=True)
def _heads() -> Iterator[None]:
    with random_heads_where_none_are():
        yield


@cache
def wide() -> Any:
    """Heads wide enough for codes."""
    return family("llama").make(head_dim=32, hidden_size=64)


def budget(method: str, tokens: int = 28) -> dict[str, Any]:
    return {} if method in ("full", "minference") else {"budget": tokens}


def holds_them(cache: Any, batch: int = 2) -> None:
    for layer in range(len(cache.layers)):
        for sequence in range(batch):
            for row in cache.positions(layer, sequence):
                assert set(row) >= KEPT, f"layer {layer}, sequence {sequence} lacks {sorted(KEPT - set(row))}"


@pytest.mark.covering
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "method", [name if name in COVERING else pytest.param(name, marks=pytest.mark.slow) for name in ALL]
)
def test_every_method_holds_them_in_prompt_steps_and_turns(method: str) -> None:
    model, (ids, mask) = llama(), prompts(2, 72)
    with (
        torch.no_grad(),
        mp.compress(model, method, page_slots=4, **budget(method), **OPTIONS.get(method, {})) as cache,
    ):
        cache.protect(SPANS)
        if method in MERGING:  # a mask knows nothing of merged entries
            for _ in passes(model, cache, Mask(cache), steps_after(ids, 8), mask):
                holds_them(cache)
        else:
            equals_a_mask(model, cache, ids, mask, 8, after=lambda: holds_them(cache))
        turn = ids[:, 40:60]
        model(turn, cache=cache)
        holds_them(cache)
        for step in turn[:, :6].split(1, 1):
            model(step, cache=cache)
            holds_them(cache)
        cache.check_integrity()


class Spans(Oracle):
    """The full cache under a rule that knows of kept spans: sinks are what is kept, and the budget holds both."""

    def _evict(self, heads: list[Any], budget: int, n: int, is_step: bool) -> None:
        """As the rule says of what is not kept, in the part of the budget that the kept leave."""
        aside = [[j for j in head.kept if j in KEPT and j >= self.rule.sinks] for head in heads]
        n_kept = sum(position >= self.rule.sinks for position in KEPT)
        for head, own in zip(heads, aside, strict=True):
            head.kept = [j for j in head.kept if j not in set(own)]
            head.cap -= n_kept
        super()._evict(heads, budget - n_kept, n, is_step)
        for head, own in zip(heads, aside, strict=True):
            head.kept = sorted([*head.kept, *own])
            head.cap += n_kept


@pytest.mark.covering
@pytest.mark.parametrize(
    ("method", "options", "rule"),
    [
        ("h2o", {"sinks": 2}, Rule("sum", 22, sinks=2, recent=0.5)),
        ("window", {"sinks": 1}, Rule("newest", 22, sinks=1)),
        ("tova", {}, Rule("last", 22, shared=True)),
        ("snapkv", {"window": 4, "kernel": 1}, Rule("window", 22, recent=4, window=4, evicts_while_decoding=False)),
        ("ada", {"alpha": 0.3, "score": "h2o", "every": 0}, Rule("sum", 22, sinks=4, recent=0.5, alpha=0.3)),
    ],
)
@pytest.mark.parametrize("batch", [1, 3])
def test_the_rest_is_dropped_as_by_an_independent_rule(
    method: str, options: dict[str, Any], rule: Rule, batch: int
) -> None:
    model, (ids, mask) = llama(), prompts(batch)
    oracle = Spans(rule)
    with torch.no_grad(), mp.compress(model, method, 22, page_slots=4, **options) as cache:
        cache.protect(SPANS)
        equals_a_mask(model, cache, ids, mask, 20, oracle)
        for (layer, b, h), head in oracle.heads.items():
            assert cache.positions(layer, b)[h] == head.kept


def test_the_heads_compete_for_what_the_spans_leave() -> None:
    model, (ids, _) = llama(), prompts(2)
    with torch.no_grad(), mp.compress(model, "ada", 24, page_slots=4, score="h2o", every=3) as cache:
        cache.protect(SPANS)
        for step in steps_after(ids, 16):
            model(step, cache=cache)
            holds_them(cache)
            for layer in range(2):
                assert sum(map(len, cache.positions(layer))) == 48


@pytest.mark.covering
@pytest.mark.parametrize("codec", ["int4", "rotated4"])
@pytest.mark.parametrize("method", ["h2o", "snapkv", "keydiff"])
def test_codes_are_held_too(codec: str, method: str) -> None:
    model, (ids, _) = wide(), prompts(2, 300)
    with torch.no_grad(), mp.compress(model, method, 150, codec) as cache:
        cache.protect(SPANS)
        for step in steps_after(ids, 40):
            model(step, cache=cache)
        holds_them(cache)
        model(ids[:, :100], cache=cache)
        model(ids[:, :1], cache=cache)
        holds_them(cache)
        cache.check_integrity()


def test_a_lower_tier_takes_none_of_them() -> None:
    model, (ids, _) = wide(), prompts(1, 300)
    with torch.no_grad(), mp.compress(model, "h2o", 100, "mikv") as cache:
        cache.protect(SPANS)
        for step in steps_after(ids, 80):
            model(step, cache=cache)
        for layer_cache in cache.layer_caches:
            assert layer_cache.table is not None
            assert layer_cache.table.quantized is not None
            lower = layer_cache.table.quantized.positions(layer_cache.table.quantized.rows(0))
            assert bool((lower >= 0).any())
            assert not KEPT & {int(position) for position in lower.flatten()}


def test_a_prompt_in_chunks_holds_them_while_it_is_read() -> None:
    model, (ids, _) = llama(), prompts(1, 96)
    with torch.no_grad(), mp.compress(model, "keydiff", 24, page_slots=4, prefill="chunks", chunk=16) as cache:
        cache.protect(SPANS)
        for part in ids.split(16, 1):
            model(part, cache=cache)
            seen = int(cache.tracker.seen[0])
            for layer in range(2):
                for row in cache.positions(layer):
                    assert set(row) >= {position for position in KEPT if position < seen}
                    assert len(row) <= 24 + 16


def test_beams_forks_and_documents_take_them_along(tmp_path: Any) -> None:
    model, (ids, _) = llama(dtype=torch.float32), prompts(1)
    with torch.no_grad(), mp.compress(model, "h2o", 16, page_slots=4) as cache:
        cache.protect(SPANS)
        model(ids, cache=cache)
        mp.save_document(cache, ids, tmp_path / "text.safetensors")
        child = cache.fork()
        cache.batch_repeat_interleave(3)
        cache.reorder_cache(torch.tensor([2, 2, 0]))
        for step in steps_after(ids, 30)[1:]:
            model(step.expand(3, -1), cache=cache)
            model(step, cache=child)
        holds_them(cache, 3)
        holds_them(child, 1)
        child.close()
    restored, read = mp.restore_document(model, tmp_path / "text.safetensors")
    with torch.no_grad(), restored:
        for step in steps_after(read, 30)[1:]:
            model(step, cache=restored)
        holds_them(restored, 1)


def test_each_sequence_has_its_own_and_none_is_the_same_as_before() -> None:
    model, (ids, _) = llama(dtype=torch.float32), prompts(2)
    with torch.no_grad(), mp.compress(model, "h2o", 16, page_slots=4) as plain:
        before = [model(step, cache=plain).logits for step in steps_after(ids, 20)]
        lost = KEPT - set(plain.positions(0, 1)[0])
    assert lost, "without spans some of them leave"
    with torch.no_grad(), mp.compress(model, "h2o", 16, page_slots=4) as cache:
        cache.protect(SPANS, sequence=1)
        after = [model(step, cache=cache).logits for step in steps_after(ids, 20)]
        assert all(torch.equal(a[0], b[0]) for a, b in zip(before, after, strict=True))
        assert set(cache.positions(0, 1)[0]) >= KEPT
        cache.reset()
        again = [model(step, cache=cache).logits for step in steps_after(ids, 20)]
    assert all(torch.equal(a, b) for a, b in zip(before, again, strict=True))


def test_generate_in_a_block_reads_a_prompt_with_them() -> None:
    model, (ids, _) = llama(dtype=torch.float32), prompts(1)
    with mp.compress(model, "h2o", 16, page_slots=4) as cache:
        cache.protect(SPANS)
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False)
        holds_them(cache, 1)


def test_a_later_turn_can_have_its_own() -> None:
    model, (ids, _) = llama(), prompts(1)
    with torch.no_grad(), mp.compress(model, "h2o", 16, page_slots=4) as cache:
        model(ids, cache=cache)
        with pytest.raises(CacheMismatchError, match="has read 40 tokens"):
            cache.protect(SPANS)
        with pytest.raises(CacheMismatchError, match="the cache holds 1"):
            cache.protect([(50, 52)], sequence=1)
        cache.protect([(44, 48)])
        model(ids, cache=cache)
        for step in steps_after(ids, 30)[1:]:
            model(step, cache=cache)
        for layer in range(2):
            for row in cache.positions(layer):
                assert set(row) >= set(range(44, 48))
                assert len(row) == 16


@pytest.mark.parametrize(("given", "kept"), [(12, 30), ("20%", 30), (0.2, 30)])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_more_than_the_budget_is_refused_with_the_numbers(given: Any, kept: int) -> None:
    model, (ids, _) = llama(), prompts(1)
    entries = 12 if given == 12 else 8
    with torch.no_grad(), mp.compress(model, "h2o", given, sinks=2, recent=3) as cache:
        cache.protect([(0, kept)])
        with pytest.raises(BudgetError, match=rf"{kept - 2} kept tokens and 5 .* budget of {entries} entries"):
            model(ids, cache=cache)


def test_bytes_that_they_exceed_are_refused() -> None:
    model, (ids, _) = llama(), prompts(1)
    with torch.no_grad(), mp.compress(model, "h2o", "12KiB", page_slots=4) as cache:
        cache.protect([(0, 38)])
        with pytest.raises(BudgetError, match="34 kept tokens"):
            model(ids, cache=cache)


@pytest.mark.parametrize(
    ("spans", "match"),
    [
        ([(4, 2)], "no span"),
        ([(-1, 2)], "no span"),
        ([(0, 5), (4, 6)], "overlaps"),
        ([(0, 1.5)], "no span"),
        ([(True, 2)], "no span"),
        ("0-4", "list of spans"),
        ([(0, 2**40)], "no span"),
        ([(1,)], "no span"),
        ([(2 * n, 2 * n + 1) for n in range(65)], "65 spans"),
    ],
)
def test_what_is_no_span_is_refused(spans: Any, match: str) -> None:
    with mp.compress(llama(), "h2o", 16) as cache:
        with pytest.raises(OptionError, match=match):
            cache.protect(spans)
        cache.reset()
        cache._used = True


@pytest.mark.parametrize(("method", "options", "why"), [("streaming", {}, "absolute"), ("infllm", {}, "looks up")])
def test_methods_that_cannot_say_why(method: str, options: dict[str, Any], why: str) -> None:
    with mp.compress(llama(), method, 400, **options) as cache:
        with pytest.raises(OptionError, match=why):
            cache.protect(SPANS)
        cache._used = True


def test_every_other_method_can() -> None:
    assert "h2o" in METHODS.names()
    for name in ALL:
        if name not in ("streaming", "fastgen", "kvzip"):
            assert METHODS.get(name)().kept_refusal() is None


def test_positions_of_all_sequences_are_counted_as_those_of_each() -> None:
    spans = KeptSpans()
    for sequence, own in enumerate((((0, 4), (9, 12)), (), ((3, 20),))):
        spans.expect(own, sequence)
    spans.begin(3)
    for first in (0, 2, 10, 30):
        assert spans.counts(first).tolist() == [spans.count(s, first) for s in range(3)]
    assert spans.counts(np.array([1, 0, 10])).tolist() == [spans.count(0, 1), 0, spans.count(2, 10)]
    assert spans.marked(3).tolist() == [True, False, True]
