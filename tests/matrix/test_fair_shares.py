"""Spans that keep a share: no head of any layer holds less of them than their part of the budget."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain, pairwise
from typing import Any

import pytest
import torch

import millpond as mp
from millpond.errors import CacheMismatchError, OptionError
from tests.helpers.matrix.hidden import equals_a_mask, steps_after
from tests.helpers.matrix.models import llama, prompts
from tests.helpers.matrix.oracle import Oracle, Rule
from tests.helpers.random_heads import random_heads_where_none_are
from tests.matrix.test_kept_spans import OPTIONS, wide
from tests.server.test_forgotten import RULES, STORY

SPANS = ((0, 9), (9, 24), (26, 38))
#: One of each way in which a method holds its budget: by the kernel, a plan at each step, merging.
COVERING = ("h2o", "tova", "snapkv", "window", "pyramidkv", "keydiff", "d2o", "cam", "kvzip", "random", "chunkkv")


@pytest.fixture(autouse=True)
def _heads() -> Iterator[None]:
    with random_heads_where_none_are():
        yield


def counts(row: Sequence[int], spans: Sequence[tuple[int, int]] = SPANS) -> list[int]:
    return [sum(begin <= position < end for position in row) for begin, end in spans]


class Shares(Oracle):
    """The full cache under a rule by which each span keeps its best entries, as many as its share says."""

    def __init__(self, rule: Rule, share: float) -> None:
        super().__init__(rule)
        self.share = share

    def _evict(self, heads: list[Any], budget: int, n: int, is_step: bool) -> None:
        rule = self.rule
        recent = int(rule.recent * budget) if isinstance(rule.recent, float) else rule.recent
        room = min(self.share * budget, budget - rule.sinks - recent)
        values = [self._value(head, n, rule.score == "window" and not is_step) for head in heads]
        if rule.shared:
            values = [{j: sum(v[j] for v in values) / len(values) for j in heads[0].kept}] * len(heads)
        for head, value in zip(heads, values, strict=True):
            safe = {j for j in head.kept if j < rule.sinks or j >= n - recent}
            for begin, end in SPANS:
                own = [j for j in head.kept if begin <= j < end]
                own.sort(key=lambda j: (j in safe, value.get(j, 0.0), j), reverse=True)
                safe |= set(own[: math.floor((min(end, n) - min(begin, n)) * room / n)])
            free = sorted((j for j in head.kept if j not in safe), key=lambda j: (value[j], j))
            drop = set(free[: max(0, len(head.kept) - head.cap)])
            head.kept = [j for j in head.kept if j not in drop]


@pytest.mark.covering
@pytest.mark.parametrize(
    ("method", "options", "rule", "share"),
    [
        ("h2o", {"sinks": 2, "recent": 0.25}, Rule("sum", 16, sinks=2, recent=0.25), 0.6),
        ("h2o", {"sinks": 2}, Rule("sum", 16, sinks=2, recent=0.5), 1.0),
        ("window", {"sinks": 1}, Rule("newest", 16, sinks=1), 0.7),
        ("tova", {}, Rule("last", 16, shared=True), 0.9),
        ("snapkv", {"window": 4, "kernel": 1}, Rule("window", 16, recent=4, window=4, evicts_while_decoding=False), 1),
    ],
)
@pytest.mark.parametrize("batch", [1, 3])
def test_what_stays_is_what_a_plain_rule_says(
    method: str, options: dict[str, Any], rule: Rule, share: float, batch: int
) -> None:
    model, (ids, mask) = llama(), prompts(batch)
    oracle = Shares(rule, share)
    with torch.no_grad(), mp.compress(model, method, 16, page_slots=4, **options) as cache:
        cache.protect(SPANS, share=share)
        equals_a_mask(model, cache, ids, mask, 16, oracle)
        for (layer, b, h), head in oracle.heads.items():
            assert cache.positions(layer, b)[h] == head.kept


def shares_hold(cache: Any, share: float, before: Any = None) -> list[list[list[int]]]:
    """Each head holds its part of each span, or what it held `before`; the counts."""
    found = []
    for layer in range(len(cache.layers)):
        for b in range(cache.tracker.n_seq):
            rows, seen = cache.positions(layer, b), int(cache.tracker.seen[b])
            budget = cache.layer_caches[layer].table.budgets()[b].mean()
            budget = min(budget, sum(map(len, rows)) / len(rows))
            least = [math.floor((min(e, seen) - min(a, seen)) * share * int(budget) / seen) for a, e in SPANS]
            held = [[math.inf] * len(SPANS) for _ in rows] if before is None else before[len(found)]
            for row, was in zip(rows, held, strict=True):
                assert all(n >= min(w, o) for n, w, o in zip(counts(row), least, was, strict=True)), (layer, b, least)
            found.append([counts(row) for row in rows])
    return found


@pytest.mark.covering
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("method", COVERING)
def test_shares_hold_in_prompts_steps_and_turns(method: str) -> None:
    model, (ids, mask) = llama(), prompts(2, 72)
    with torch.no_grad(), mp.compress(model, method, 24, page_slots=4, **OPTIONS.get(method, {})) as cache:
        cache.protect(SPANS, share=0.4)
        model(ids, attention_mask=mask, cache=cache)
        held = shares_hold(cache, 0.4)
        for step in ids[:, :10].split(1, 1):
            model(step, cache=cache)
            held = shares_hold(cache, 0.4, held)
        model(ids[:, 10:40], cache=cache)
        held = shares_hold(cache, 0.4, held)
        for step in ids[:, :6].split(1, 1):
            model(step, cache=cache)
            held = shares_hold(cache, 0.4, held)
        cache.check_integrity()


@pytest.mark.parametrize("every", [0, 3])
def test_heads_compete_for_what_the_shares_leave(every: int) -> None:
    model, (ids, _) = llama(), prompts(2)
    options = {"score": "h2o/recent=0.1", "alpha": 0.1, "every": every}
    with torch.no_grad(), mp.compress(model, "ada", 16, page_slots=4, **options) as cache:
        cache.protect(SPANS, share=0.7)
        model(ids, cache=cache)
        held = shares_hold(cache, 0.7)
        for step in steps_after(ids, 24)[1:]:
            model(step, cache=cache)
            held = shares_hold(cache, 0.7, held)
            for layer in range(2):
                assert sum(map(len, cache.positions(layer))) == 32
        cache.check_integrity()


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("method", ["h2o", "tova"])
def test_an_instruction_that_heads_lose_whole_keeps_its_share_in_each(method: str) -> None:
    """A message between a long text and the newest entries, at 10 %, when the prompt was read and after an answer."""
    model, tokenizer = mp.load_model("pond-recall", "f32"), mp.load_tokenizer("pond-recall")
    parts = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in (STORY * 3, RULES * 4, STORY * 2)]
    ends = [0, *accumulate(map(len, parts))]
    spans, ids = list(pairwise(ends)), torch.tensor([list(chain(*parts))])
    n, total = len(parts[1]), ends[-1]
    held = {}
    for share in (None, 0.4):
        with torch.no_grad(), mp.compress(model, method, "10%") as cache:
            if share is not None:
                cache.protect(spans, share=share)
            model(ids, cache=cache)
            for step in ids[:, :8].split(1, 1):
                model(step, cache=cache)
            rows = [row for layer in range(len(cache.layers)) for row in cache.positions(layer)]
            held[share] = [counts(row, spans)[1] for row in rows]
    assert min(held[None]) == 0
    least = math.floor(n * 0.4 * round(total * 0.1) / (total + 8))
    assert least == 1
    assert min(held[0.4]) >= least


def test_kept_spans_count_towards_their_share() -> None:
    model, (ids, _) = llama(), prompts(1)
    kept = set(range(9, 15))
    with torch.no_grad(), mp.compress(model, "window", 20, page_slots=4) as cache:
        cache.protect([(9, 15)])
        cache.protect(SPANS, share=1.0)
        model(ids, cache=cache)
        for row in cache.positions(0):  # 14 of 20 entries are left by the kept: floor(n * 14 / 40) each
            assert set(row) >= kept
            assert counts(row) == [3, 6, 9], row
            assert len(row) == 20


@pytest.mark.parametrize("codec", ["int4", "rotated4"])
def test_codes_count_too(codec: str) -> None:
    model, (ids, _) = wide(), prompts(1, 300)
    spans = [(0, 60), (60, 200)]
    with torch.no_grad(), mp.compress(model, "window", 140, codec) as cache:
        cache.protect(spans, share=0.5)
        model(ids, cache=cache)
        for n, step in enumerate(ids[:, :60].split(1, 1)):
            model(step, cache=cache)
            least = [math.floor((end - begin) * 70 / (301 + n)) for begin, end in spans]
            for row in (row for layer in range(2) for row in cache.positions(layer)):
                assert all(a >= b for a, b in zip(counts(row, spans), least, strict=True))
        cache.check_integrity()


def test_a_prompt_in_chunks_holds_them_while_it_is_read() -> None:
    model, (ids, _) = llama(), prompts(1, 96)
    with torch.no_grad(), mp.compress(model, "keydiff", 24, page_slots=4, prefill="chunks", chunk=16) as cache:
        cache.protect(SPANS, share=0.8)
        for part in ids.split(16, 1):
            model(part, cache=cache)
            seen = int(cache.tracker.seen[0])
            least = [math.floor((min(e, seen) - min(a, seen)) * 0.8 * 24 / max(seen, 96)) for a, e in SPANS]
            for row in (row for layer in range(2) for row in cache.positions(layer)):
                assert all(n >= w for n, w in zip(counts(row), least, strict=True)), (seen, row, least)


def test_beams_forks_and_documents_take_them_along(tmp_path: Any) -> None:
    model, (ids, _) = llama(dtype=torch.float32), prompts(1)
    with torch.no_grad(), mp.compress(model, "window", 16, page_slots=4) as cache:
        cache.protect(SPANS, share=1.0)
        model(ids, cache=cache)
        mp.save_document(cache, ids, tmp_path / "text.safetensors")
        child = cache.fork()
        cache.batch_repeat_interleave(3)
        cache.reorder_cache(torch.tensor([2, 2, 0]))
        for step in steps_after(ids, 30)[1:]:
            model(step.expand(3, -1), cache=cache)
            model(step, cache=child)
        expected = child.positions(1)
        assert [counts(row) for row in expected] == [[2, 3, 2], [2, 3, 2]]
        assert all(cache.positions(1, b) == expected for b in range(3))
        child.close()
    restored, read = mp.restore_document(model, tmp_path / "text.safetensors")
    with torch.no_grad(), restored:
        for step in steps_after(read, 30)[1:]:
            model(step, cache=restored)
        assert restored.positions(1) == expected


def test_each_sequence_has_its_own_and_none_is_the_same_as_before() -> None:
    model, (ids, _) = llama(dtype=torch.float32), prompts(2)
    with torch.no_grad(), mp.compress(model, "h2o", 16, page_slots=4) as plain:
        before = [model(step, cache=plain).logits for step in steps_after(ids, 20)]
    with torch.no_grad(), mp.compress(model, "h2o", 16, page_slots=4) as cache:
        cache.protect(SPANS, share=1.0, sequence=1)
        after = [model(step, cache=cache).logits for step in steps_after(ids, 20)]
        assert all(torch.equal(a[0], b[0]) for a, b in zip(before, after, strict=True))
        assert not torch.equal(before[-1][1], after[-1][1])
        cache.reset()
        again = [model(step, cache=cache).logits for step in steps_after(ids, 20)]
    assert all(torch.equal(a, b) for a, b in zip(before, again, strict=True))


@pytest.mark.parametrize(
    ("spans", "share", "match"),
    [
        ([(0, 4)], 0, "above 0"),
        ([(0, 4)], 1.5, "above 0"),
        ([(0, 4)], True, "above 0"),
        ([(0, 4)], "1", "above 0"),
        ([(0, 4)], math.nan, "above 0"),
        ([(0, 5), (4, 6)], 0.5, "overlaps"),
        ([(4, 2)], 0.5, "no span"),
        ([(0, 4), (0, 4)], 0.5, "overlaps"),
        ([(-1, 4)], 0.5, "no span"),
        ([(0, 2**40)], 0.5, "no span"),
        ([(n, n + 1) for n in range(257)], 0.5, "257 spans"),
    ],
)
def test_what_has_no_share_is_refused(spans: Any, share: Any, match: str) -> None:
    with mp.compress(llama(), "h2o", 16) as cache:
        with pytest.raises(OptionError, match=match):
            cache.protect(spans, share=share)
        cache._used = True


@pytest.mark.parametrize(
    ("method", "options", "why"),
    [
        ("streaming", {}, "absolute"),
        ("infllm", {}, "looks up"),
        ("fastgen", {"special": "1", "punctuation": "5"}, "rules"),
        ("duo_attention", {"recent": 4}, "rules"),
        ("elastic", {}, "rules"),
    ],
)
def test_methods_that_cannot_say_why(method: str, options: dict[str, Any], why: str) -> None:
    with mp.compress(llama(), method, 400, **options) as cache:
        with pytest.raises(OptionError, match=why):
            cache.protect(SPANS, share=0.5)
        cache._used = True


def test_lower_tiers_and_read_tokens_are_refused() -> None:
    with mp.compress(wide(), "h2o", 100, "mikv") as cache:
        with pytest.raises(OptionError, match="lower tier"):
            cache.protect(SPANS, share=0.5)
        cache._used = True
    model, (ids, _) = llama(), prompts(1)
    with torch.no_grad(), mp.compress(model, "h2o", 16) as cache:
        model(ids, cache=cache)
        with pytest.raises(CacheMismatchError, match="has read 40"):
            cache.protect(SPANS, share=0.5)
