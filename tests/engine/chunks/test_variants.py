"""Variants of a chunk behind different contexts: kept where they differ, and taken where they fit."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

import millpond as mp
from millpond.cache.chunks.store import ChunkStore
from millpond.cache.chunks.variant import ids_key
from millpond.engine.request import Request
from millpond.policy.reuse import filled_sums
from tests.helpers.engine.chunked import LEAD, QUESTION, A, B, C, ask, chunked, close, engine
from tests.helpers.engine.helpers import add, greedy, prompt

pytestmark = pytest.mark.filterwarnings("ignore::millpond.hf.layer_budgets.BudgetFloorWarning")

#: The same chunk behind two other ones.
BEHIND_B = chunked(mp.Chunk(B), mp.Chunk(A), QUESTION)
BEHIND_C = chunked(mp.Chunk(C), mp.Chunk(A), QUESTION)


def alternating(store: ChunkStore, rounds: int = 3) -> list[tuple[int, int]]:
    """Computed tokens of chunks in each round, behind one context and behind the other."""
    of = engine(store=store)
    kvs = [(ask(of, BEHIND_B), ask(of, BEHIND_C)) for _ in range(rounds)]
    of.close()
    lengths = (len(B) + len(A), len(C) + len(A))
    return [
        tuple(n - out.completions[0].kv.reused_tokens for n, out in zip(lengths, outs, strict=True))  # type: ignore[misc]
        for outs in kvs
    ]


def test_two_alternating_contexts_end_with_two_variants() -> None:
    store = ChunkStore(None, alpha=0.5)
    first, second, third = alternating(store)
    assert sorted(facts.before for facts in store.find(ids_key(A))) == sorted([(ids_key(B),), (ids_key(C),)])
    assert first[0] == len(B) + len(A)
    assert len(C) < first[1] < len(C) + len(A), "behind C the chunk is blended"
    assert second == third == (0, 0), "each context has its own"


def test_without_variants_each_other_context_is_computed_again() -> None:
    store = ChunkStore(None, alpha=0.5, keep_above=1)
    _, second, third = alternating(store)
    assert second == third
    assert third[1] > 0
    assert len(store.find(ids_key(A))) == 1


def test_a_kept_variant_is_what_its_prompt_computed() -> None:
    of = engine(store=ChunkStore(None, alpha=0.5))
    ask(of, BEHIND_B)
    blended, again = ask(of, BEHIND_C), ask(of, BEHIND_C)
    assert blended.completions[0].kv.recomputed_tokens > again.completions[0].kv.recomputed_tokens
    assert close(again, blended), "the same numbers, without computing them"
    assert not again.completions[0].kv.exact
    base, kept = sorted(of.config.chunk_store.find(ids_key(A)), key=lambda facts: not facts.exact)
    scores = [of.config.chunk_store.take(facts, 0.0).scores for facts in (base, kept)]
    as_before = torch.isclose(*scores, rtol=1e-4).sum()
    assert len(A) - as_before <= blended.completions[0].kv.recomputed_tokens, "the others count with what they have"
    assert 0 < kept.impact < 1
    of.close()


@pytest.mark.parametrize(("variants", "held"), [(1, 1), (2, 2), (3, 3), (9, 4)])
def test_no_more_variants_than_asked_for(variants: int, held: int) -> None:
    of = engine(store=ChunkStore(None, alpha=0.5, variants=variants))
    for lead in (B, C, LEAD, prompt(11)):
        ask(of, chunked(mp.Chunk(lead), mp.Chunk(A), QUESTION))
    assert len(of.config.chunk_store.find(ids_key(A))) == held
    of.close()


@pytest.mark.parametrize("recompute", [0, 0.3, 0.9])
def test_a_share_that_is_asked_for_keeps_no_variant(recompute: float) -> None:
    of = engine(store=ChunkStore(None, alpha=0.5))
    ask(of, BEHIND_B)
    ask(of, BEHIND_C, recompute=recompute)
    assert len(of.config.chunk_store.find(ids_key(A))) == 1
    of.close()


def test_a_variant_of_a_salted_request_serves_its_salt_alone() -> None:
    of = engine(store=ChunkStore(None, alpha=0.5))
    ask(of, BEHIND_B)
    add(of, Request(request_id="salted", prompt=BEHIND_C, params=greedy(2), cache_salt="one"))
    while of.busy:
        of.step()
    assert [facts.before for facts in of.config.chunk_store.find(ids_key(A))] == [(ids_key(B),)]
    assert ask(of, BEHIND_C).completions[0].kv.recomputed_tokens > 0
    of.close()


def test_attention_of_tokens_that_were_not_computed() -> None:
    sums = torch.tensor([[0.3, 0.1, 0.6], [9.0, 9.0, 9.0], [0.1, 0.1, 0.4]])
    filled = filled_sums(sums, torch.tensor([True, False, True]), torch.tensor([5.0, 0.6, 5.0]))
    assert torch.equal(filled[::2], sums[::2])
    assert filled[1].tolist() == pytest.approx([0.4, 0.2, 0.5])
    no_parts = filled_sums(torch.tensor([[0.5], [0.0]]), torch.tensor([True, False]), torch.tensor([0.0, 0.2]))
    assert no_parts.flatten().tolist() == [0.5, 0.5]


def zipf_computed(rule: str, queries: int, seed: int) -> int:
    """Tokens computed for queries whose chunks are drawn by Zipf's law, with room for a third of them."""
    drawn = random.Random(seed)
    chunks = [tuple(drawn.randrange(1, 60) for _ in range(12)) for _ in range(24)]
    weights = [1 / (rank + 1) for rank in range(len(chunks))]
    sizes = ChunkStore(None)
    engine(store=sizes).close()
    of = engine(store=ChunkStore(None, memory=8 * sizes.size_of(12), rule=rule, alpha=0.5), max_step_tokens=64)
    for _ in range(queries):
        picked = list(dict.fromkeys(drawn.choices(range(len(chunks)), weights, k=3)))
        ask(of, chunked(*(mp.Chunk(chunks[n]) for n in picked), QUESTION), new=1)
    computed = of.stats().prompt_tokens
    of.close()
    return computed


def test_craft_computes_no_more_than_lru_under_zipf() -> None:
    craft, lru = (np.sum([zipf_computed(rule, 60, seed) for seed in (1, 2)]) for rule in ("craft", "lru"))
    assert craft <= lru, f"{craft} tokens against {lru}"
