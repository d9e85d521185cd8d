"""Heads that compete while decoding: equal to a mask over the full cache, exact totals, no state in the batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache

import millpond as mp
from millpond.errors import OptionError, PoolFullError
from millpond.methods import METHODS
from tests.helpers.hf.families import FAMILIES, shared_model, text
from tests.helpers.matrix.models import llama, prompts
from tests.helpers.matrix.oracle import Head, Oracle, Rule, running

STEPS = 40


class Competing(Oracle):
    """At every `every`-th token of a sequence the lowest entries of all heads of a layer leave together."""

    def __init__(self, rule: Rule, every: int) -> None:
        super().__init__(rule)
        self.every = every

    def _value(self, head: Head, n: int, pooled: bool) -> dict[int, float]:
        """Divided by the number of queries that saw the entry, so that old entries have no head start."""
        return {j: total / (n - j) for j, total in head.score.items()}

    def _evict(self, heads: list[Head], budget: int, n: int, is_step: bool) -> None:
        assert isinstance(self.rule.recent, float)
        assert self.rule.alpha is not None
        if not is_step or n % self.every or any(len(h.kept) <= h.cap for h in heads):
            super()._evict(heads, budget, n, is_step)
            return
        safe = [{j for j in h.kept if j < self.rule.sinks or j >= n - int(self.rule.recent * budget)} for h in heads]
        spare = [
            len(h.kept) - max(1, len(s) + int(self.rule.alpha * max(0, budget - len(s))))
            for h, s in zip(heads, safe, strict=True)
        ]
        candidates = sorted(
            (self._value(h, n, False)[j], j, i) for i, h in enumerate(heads) for j in h.kept if j not in safe[i]
        )
        left = len(heads)
        for _, j, i in candidates:
            if left and spare[i]:
                heads[i].kept.remove(j)
                spare[i] -= 1
                left -= 1
        for head in heads:
            head.cap = len(head.kept)


@pytest.mark.covering
@pytest.mark.parametrize("heads", ["mha", "gqa"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("every", [1, 3])
def test_drop_equals_mask(every: int, batch: int, heads: str) -> None:
    model, (ids, mask) = llama(heads), prompts(batch)
    later = torch.randint(2, 96, (batch, STEPS), generator=torch.Generator().manual_seed(2))
    oracle = Competing(Rule("sum", 14, sinks=2, recent=0.25, alpha=0.3), every)
    stock = DynamicCache(config=model.config)
    options: dict[str, Any] = {"alpha": 0.3, "score": "h2o/sinks=2/recent=0.25/average=1", "every": every}
    changed = 0
    with torch.no_grad(), mp.compress(model, method="ada", budget=14, page_slots=4, **options) as cache:
        for t in range(STEPS + 1):
            step = ids if t == 0 else later[:, t - 1 : t]
            seen = torch.cat([mask, torch.ones(batch, t, dtype=mask.dtype)], 1)
            places = (seen.cumsum(1) - 1).clamp(min=0)[:, -step.shape[1] :]
            inputs = {"attention_mask": seen, "position_ids": places}
            before = cache.stats().stored
            ours = model(step, cache=cache, **inputs).logits
            with running(model, oracle):
                theirs = model(step, cache=stock, **inputs).logits
            real = seen[:, -step.shape[1] :].bool()
            assert float((ours - theirs)[real].abs().max()) <= 1e-12, f"step {t}"
            stats = cache.stats()
            assert all(sum(row) == 2 * 14 for layer in stats.stored for row in layer)
            assert sum(pool.n_live for pool in cache.pools) == sum(
                -(-n // 4) for layer in stats.stored for row in layer for n in row
            )
            changed += t > 0 and stats.stored != before
        for (layer, b, h), head in oracle.heads.items():
            assert cache.positions(layer, b)[h] == head.kept
        cache.check_integrity()
    assert changed > 3


def lengths(rows: list[int], every: int, budget: int | str = 14, page_slots: int = 4) -> tuple[Any, Any]:
    """Tokens and positions kept after 20 steps of the chosen rows of a padded batch."""
    model, (ids, mask) = llama(), prompts(3)
    ids, mask = ids[rows], mask[rows]
    settings: dict[str, Any] = {
        "budget": budget,
        "page_slots": page_slots,
        "score": "h2o/sinks=2/average=1",
        "every": every,
    }
    with torch.no_grad(), mp.compress(model, method="ada", **settings) as cache:
        out = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=20, do_sample=False, cache=cache)
        cache.check_integrity()
        return out[:, ids.shape[1] :].tolist(), [
            [cache.positions(layer, s) for layer in range(2)] for s in range(len(rows))
        ]


@pytest.mark.parametrize("budget", [14, "40%"])
def test_the_batch_and_the_pages_change_nothing(budget: int | str) -> None:
    together = lengths([0, 1, 2], 3, budget)
    assert lengths([0, 1, 2], 3, budget, page_slots=16) == together
    for s in range(3):
        alone = lengths([s], 3, budget)
        assert (alone[0][0], alone[1][0]) == (together[0][s], together[1][s])
    assert lengths([0, 1, 2], 0, budget) != together


@pytest.mark.parametrize("name", [f.name for f in FAMILIES if f.windows or f.latents])
def test_layers_with_windows_and_latents(name: str) -> None:
    """A head never holds more of a sliding layer than its window shows, and totals stay exact."""
    model, ids = shared_model(name), text(1, 24)
    with (
        torch.no_grad(),
        mp.compress(model, method="ada", budget=9, page_slots=2, score="h2o/sinks=1", every=2) as cache,
    ):
        model(ids, cache=cache)
        first = cache.stats().stored
        for t in range(12):
            model(ids[:, t : t + 1], cache=cache)
            assert [[sum(row) for row in layer] for layer in cache.stats().stored] == [
                [sum(row) for row in layer] for layer in first
            ]
        cache.check_integrity()


def test_a_full_pool_leaves_the_cache_as_it_was() -> None:
    model, (ids, _) = llama(), prompts(1)
    with (
        torch.no_grad(),
        mp.compress(model, method="ada", budget=16, page_slots=16, alpha=1.0, score="h2o", every=1) as c,
    ):
        model(ids, cache=c)
        for pool in c.pools:
            pool.limit_bytes = pool.n_live * pool.page_bytes
        before = [c.positions(layer) for layer in range(2)]
        with pytest.raises(PoolFullError):
            model(ids[:, :1], cache=c)
        assert [c.positions(layer) for layer in range(2)] == before
        table = c.layer_caches[0].table
        assert table is not None
        assert table.budgets().tolist() == [[16, 16]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 4}, "every=4, but score='snapkv' evicts nothing while decoding"),
        ({"every": 4, "score": "rkv"}, "plans at each step"),
        ({"every": -1, "score": "h2o"}, "every=-1 must be 0 to 16,777,216"),
        ({"every": "often"}, "every='often' must be a number of steps, or auto"),
        ({"score": "h2o/sinks"}, "must read name or name/option=value"),
        ({"score": "full"}, "keeps everything"),
    ],
)
def test_what_does_not_compete_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        METHODS.get("ada")(**options)
