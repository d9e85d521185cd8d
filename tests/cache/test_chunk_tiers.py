"""Tiers of a chunk store: which variant leaves, under every paging rule, and that those in use stay."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from millpond.cache.chunks.store import ChunkStore
from millpond.cache.paging import list_paging_rules
from millpond.errors import OptionError
from tests.cache.test_chunk_files import SHAPE, file_of, taken, variant

RULES = [name for name in list_paging_rules() if name != "belady"]
SIZE = SHAPE.nbytes(2)


def store_of(folder: Path | None = None, **options: Any) -> ChunkStore:
    store = ChunkStore(folder, **options)
    store.bind(SHAPE)
    return store


def held(store: ChunkStore, n: int) -> list[int]:
    """Which of the first n chunks are there."""
    return [number for number in range(n) if store.find(variant(number).facts.chunk)]


def use(store: ChunkStore, number: int) -> bool:
    """Whether a prompt finds a chunk; it stores it otherwise."""
    found = taken(store, variant(number).facts.chunk)
    if not found:
        store.put(variant(number))
    return bool(found)


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_keeps_the_limit_and_what_is_in_use(rule: str) -> None:
    store = store_of(memory=4 * SIZE, rule=rule)
    drawn = random.Random(0)
    store.put(variant(0))
    (facts,) = store.find(variant(0).facts.chunk)
    store.pin(facts)
    hits = 0
    for _ in range(120):
        hits += use(store, drawn.randrange(1, 8))
        assert store.stats().memory_bytes <= 4 * SIZE
        assert 0 in held(store, 1)
    assert hits > 20
    store.unpin(facts)
    for number in range(20, 60):
        use(store, number)
    assert 0 not in held(store, 1), "what is no longer in use leaves"
    assert len(held(store, 60)) == 4


@pytest.mark.parametrize("tier", ["memory", "disk"])
@pytest.mark.parametrize(("rule", "stays"), [("lru", False), ("lfu", True)])
def test_the_rule_decides_in_both_tiers(tier: str, rule: str, stays: bool, tmp_path: Path) -> None:
    if tier == "memory":
        store = store_of(memory=3 * SIZE, rule=rule)
    else:
        store_of(tmp_path / "one").put(variant(1))
        size = file_of(tmp_path / "one").stat().st_size
        store = store_of(tmp_path / "store", memory=1, disk=int(3.5 * size), rule=rule)
    for _ in range(4):
        use(store, 1)
    for number in (2, 3, 4, 5):
        use(store, number)
    assert (1 in held(store, 6)) == stays, "used most, and not lately"
    assert 5 in held(store, 6)
    evicted = store.stats().memory_evicted if tier == "memory" else store.stats().disk_evicted
    assert evicted == 2


def test_craft_keeps_what_was_worth_most_to_its_uses() -> None:
    store = store_of(memory=2 * SIZE, rule="craft")
    for number, shares in ((0, (0.1,)), (1, (1.0, 0.5, 0.9))):  # f = 1 + 10, and 1 + 1 + 2 + 1.1 of more, later uses
        store.put(variant(number))
        (facts,) = store.find(variant(number).facts.chunk)
        for share in shares:
            assert store.take(facts, share) is not None
    store.put(variant(2))
    assert held(store, 3) == [0, 2], "neither the oldest nor the least used, but the least saving"
    store.put(variant(3))
    assert held(store, 4) == [0, 3], "f of both new ones is 1"


@pytest.mark.parametrize("tier", ["memory", "disk"])
def test_a_further_variant_evicts_nothing(tier: str, tmp_path: Path) -> None:
    store_of(tmp_path / "one").put(variant(1))
    size = file_of(tmp_path / "one").stat().st_size
    limits = {"memory": 2 * SIZE} if tier == "memory" else {"memory": 1, "disk": int(2.5 * size)}
    store = store_of(None if tier == "memory" else tmp_path / "store", **limits)
    store.put(variant(0))
    assert store.takes_further(0.1, 1, 2, private=False)
    store.put(variant(0, "1" * 64), replaces=False)
    assert tier == "disk" or not store.takes_further(0.1, 1, 2, private=False), "full"
    store.put(variant(0, "2" * 64), replaces=False)
    assert len(store.find(variant(0).facts.chunk)) == 2
    assert store.stats().stored == 2
    store.put(variant(1))
    assert held(store, 2) == [0, 1]
    assert len(store.find(variant(0).facts.chunk)) == 1, "what is computed in full takes its place"


def test_when_a_further_variant_is_kept() -> None:
    store = store_of(memory=9 * SIZE, variants=3, keep_above=0.1)
    cases = {(0.2, 2): True, (0.2, 3): False, (0.1, 1): False, (0.11, 1): True}
    assert {case: store.takes_further(*case, 2, private=True) for case in cases} == cases
    store_of(variants=3, keep_above=1)
    with pytest.raises(OptionError, match="keep_above=-1 must be a CFO"):
        ChunkStore(None, keep_above=-1)
    with pytest.raises(OptionError, match="keep_above=nan must be a CFO"):
        ChunkStore(None, keep_above=float("nan"))


def test_what_all_prompts_use_leaves_no_room() -> None:
    store = store_of(memory=2 * SIZE)
    for number in (0, 1):
        store.put(variant(number))
        (facts,) = store.find(variant(number).facts.chunk)
        store.pin(facts)
    store.put(variant(2))
    assert held(store, 3) == [0, 1]
    store.unpin(facts)
    store.put(variant(3))
    assert held(store, 4) == [0, 3]


def test_files_in_use_stay(tmp_path: Path) -> None:
    store = store_of(tmp_path, memory=1)
    store.put(variant(0))
    size = file_of(tmp_path).stat().st_size
    store = store_of(tmp_path, memory=1, disk=int(2.5 * size))
    (facts,) = store.find(variant(0).facts.chunk)
    store.pin(facts)
    for number in range(1, 5):
        store.put(variant(number))
    assert held(store, 5) == [0, 4]
    store.unpin(facts)
    store.put(variant(5))
    assert held(store, 6) == [4, 5]


def test_a_store_that_is_opened_again_knows_the_order(tmp_path: Path) -> None:
    import os

    store = store_of(tmp_path, memory=1)
    for number in range(3):
        store.put(variant(number))
    paths = {n: next((tmp_path / variant(n).facts.chunk[:2] / variant(n).facts.chunk).iterdir()) for n in range(3)}
    for place, number in enumerate((2, 0, 1)):
        os.utime(paths[number], (1000 + place, 1000 + place))
    size = paths[0].stat().st_size
    store = store_of(tmp_path, memory=1, disk=int(2.5 * size))
    store.put(variant(3))
    assert held(store, 4) == [1, 3]


def test_rules_that_are_none() -> None:
    with pytest.raises(OptionError, match="unknown paging rule 'lur'; did you mean 'lru'"):
        ChunkStore(None, rule="lur")
    with pytest.raises(OptionError, match="must know when each page is used next"):
        ChunkStore(None, rule="belady")
    with pytest.raises(OptionError, match="predicts nothing"):
        ChunkStore(None, rule="lru", pager="x.safetensors")
