"""Which variant of a chunk a prompt takes, of several that the store has."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from millpond.cache.chunks.store import ChunkStore
from millpond.cache.chunks.tiers import ChunkUse
from millpond.cache.chunks.variant import VariantFacts
from millpond.engine.chunks.reuse import ChunkReuse
from tests.cache.test_chunk_files import SHAPE

#: Parts that stand before the chunk in the prompt that asks.
BEFORE = ["a", "b"]


class Source:
    """What the store has of one chunk. gone: variants that cannot be read. taken: those that were asked for."""

    request = 0

    def __init__(self, variants: list[VariantFacts], gone: tuple[str, ...] = ()) -> None:
        self.variants, self.gone, self.taken, self.misses = variants, gone, [], 0

    def find(self, chunk: str) -> list[VariantFacts]:
        return [one for one in self.variants if one.chunk == chunk]

    def take(self, facts: VariantFacts, share: float, use: ChunkUse) -> Any:
        self.taken.append((facts.prefix, round(share, 6)))
        return None if facts.prefix in self.gone else SimpleNamespace(facts=facts)

    def missed(self) -> None:
        self.misses += 1


def variant(prefix: str, before: tuple[str, ...], impact: float, exact: bool = False) -> VariantFacts:
    """One that gave as much attention to each part before it."""
    return VariantFacts("chunk", 16, prefix, before, (1.0,) * len(before), impact, exact)


#: With alpha 1 their CFO before a and b: none of b, c; half of a and c; all of a and b; and an exact one elsewhere.
NONE, HALF, ALL = variant("none", ("c", "d"), 0.6), variant("half", ("a", "c"), 0.6), variant("all", ("a", "b"), 0.6)
ORDERS = [(NONE, HALF, ALL), (ALL, HALF, NONE), (HALF, ALL, NONE)]
EXACT = variant("here", ("c",), 0.9, exact=True)


def choose(source: Source, recompute: Any = "auto", prefix: str = "elsewhere", alpha: float = 1.0) -> Any:
    reuse: Any = ChunkReuse.__new__(ChunkReuse)
    reuse.store = ChunkStore(None, alpha=alpha)
    reuse.store.bind(SHAPE)
    return reuse._choose("chunk", {"chunk"}, prefix, BEFORE, recompute, source, ChunkUse(0, 0, 1))


@pytest.mark.parametrize("order", ORDERS, ids=["up", "down", "mixed"])
def test_the_variant_with_the_least_to_compute_again_is_taken(order: tuple[VariantFacts, ...]) -> None:
    source = Source(list(order))
    choice = choose(source)
    assert choice.variant.facts is ALL
    assert source.taken == [("all", 0.0)]
    assert choice.share == 0
    assert [round(one.share("elsewhere", BEFORE, 1.0), 6) for one in (NONE, HALF, ALL)] == [0.6, 0.3, 0.0]


def test_where_that_cannot_be_read_the_next_one_is() -> None:
    source = Source([NONE, HALF, ALL], gone=("all",))
    choice = choose(source)
    assert [prefix for prefix, _ in source.taken] == ["all", "half"]
    assert choice.variant.facts is HALF
    assert choice.share == pytest.approx(0.3)
    assert choice.keep, "its CFO is above 0.05: what is blended is kept"
    assert source.misses == 0
    source = Source([NONE, HALF], gone=("half", "none"))
    assert choose(source).variant is None
    assert source.misses == 1


def test_one_that_was_computed_in_just_this_context_is_taken_first() -> None:
    source = Source([NONE, HALF, EXACT])
    choice = choose(source, prefix="here")
    assert (choice.variant.facts, choice.share, choice.same) == (EXACT, 0.0, True)
    assert choose(Source([NONE, HALF, EXACT])).variant.facts is HALF, "elsewhere it is as any other"


def test_a_share_that_is_asked_for_changes_the_share_alone() -> None:
    choice = choose(Source([NONE, HALF]), recompute=0.25)
    assert (choice.variant.facts, choice.share) == (HALF, 0.25)
    assert choose(Source([NONE, HALF]), recompute=1).variant is None


def test_a_chunk_of_which_all_would_be_computed_again_is_computed_for_the_store() -> None:
    choice = choose(Source([NONE, HALF]), alpha=4.0)  # 2.4 and 1.2, which are 1
    assert choice.variant is None
    assert choice.keep
