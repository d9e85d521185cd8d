"""Blocks of the prefix cache that leave the memory for a disk come back with the same bits, or are misses."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import millpond as mp
from millpond.cache.pages.page_table import PageTable
from millpond.cache.pages.pool import PagePool
from millpond.cache.prefix_node import PrefixNode
from millpond.cache.prefix_tree import PrefixTree
from millpond.cache.swap import read_pages, write_pages
from millpond.cache.tiered.block_store import STORE_BYTES, BlockStore
from millpond.engine.engine import Engine
from millpond.engine.offload.planner import EXAMPLE
from millpond.engine.request import CacheOptions, Request
from millpond.errors import BudgetError, OptionError
from tests.helpers.engine.helpers import engine_for, finish, greedy, prompt, tokens
from tests.helpers.examples import examples
from tests.helpers.hf.families import shared_model
from tests.helpers.tiers.backends import FaultyScratch

pytestmark = pytest.mark.filterwarnings("ignore::millpond.hf.layer_budgets.BudgetFloorWarning")

#: Prompts of 5 to 12 blocks; the first two begin alike.
COMMON = prompt(60)[:48]
TEXTS = [COMMON + prompt(41), COMMON + prompt(33), prompt(97), prompt(83)]
#: Of KV: less than the prompts' blocks.
MEMORY = "40kB"


def request(number: int, method: str = "full") -> Request:
    budget = None if method == "full" else 40
    return Request(
        request_id=f"{number}", prompt=TEXTS[number], params=greedy(6), cache=CacheOptions(method=method, budget=budget)
    )


@cache
def alone(number: int, method: str = "full") -> list[int]:
    engine = engine_for("full")
    engine.add(request(number, method))
    found = tokens(finish(engine)[str(number)])
    engine.close()
    return found


def ask(engine: Engine, number: int, method: str = "full") -> int:
    """Tokens of the prompt that were not read, after the answer was compared."""
    engine.add(request(number, method))
    output: Any = None
    while engine.busy:
        output = [output, *engine.step()][-1]
        engine.check_integrity()
    assert tokens(output) == alone(number, method)
    return int(output.completions[0].kv.shared_tokens)


def of_prefixes(engine: Engine) -> Any:
    found = engine.stats().prefix
    assert found is not None
    return found


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    monkeypatch.setattr("millpond.engine.components.BlockStore", _faulty_store)
    FaultyScratch.full = None
    made = engine_for("full", prefix_cache=True, prefix_disk="4MiB", prefix_folder=tmp_path, kv_memory=MEMORY)
    yield made
    FaultyScratch.full = None
    made.close()
    assert made.stats().kv_reserved == 0


def _faulty_store(folder: Path, capacity: int) -> BlockStore:
    return BlockStore(folder, capacity, open_file=FaultyScratch)


def file_of(engine: Engine) -> FaultyScratch:
    assert engine._parts.prefix_store is not None
    return engine._parts.prefix_store._extents._file  # type: ignore[return-value]


@pytest.mark.parametrize("method", ["full", "snapkv"])
def test_blocks_come_back_from_the_disk_with_the_same_tokens(method: str, engine: Engine, tmp_path: Path) -> None:
    engine_without = engine_for("full", prefix_cache=True, kv_memory=MEMORY)
    asked = [0, 2, 3, 1, 0, 2, 3, 0]
    shared = [ask(engine, number, method) for number in asked]
    without = [ask(engine_without, number, method) for number in asked]
    engine_without.close()
    assert sum(shared) > sum(without) + 100
    window = 32 if method == "snapkv" else 1
    assert shared[-4:] == [(len(TEXTS[n]) - window) // 4 * 4 for n in asked[-4:]], "all of them were known"
    found = of_prefixes(engine)
    assert found.returned > 10
    assert found.lost == 0
    assert found.disk_blocks > 0
    assert found.disk_bytes == found.disk_blocks * 4096
    assert list(tmp_path.iterdir()) == [], "the file has no name"


def test_a_small_disk_forgets_what_was_unused_longest(tmp_path: Path) -> None:
    engine = engine_for("full", prefix_cache=True, prefix_disk="64KiB", prefix_folder=tmp_path, kv_memory=MEMORY)
    most = 0
    for number in [0, 2, 3, 1, 0, 2, 3, 1]:
        ask(engine, number)
        found = of_prefixes(engine)
        most = max(most, found.disk_bytes)
        assert found.disk_bytes <= 64 << 10
        assert os.fstat(engine._parts.prefix_store._extents._file._fd).st_size <= 64 << 10  # type: ignore[union-attr]
    assert most == 64 << 10
    engine.close()


# ---------------------------------------------------------------------- faults are misses


def _eio(file: FaultyScratch) -> None:
    file.bad |= set(range(0, file.size, 4096))


def _flipped(file: FaultyScratch) -> None:
    file.flipped |= set(range(17, file.size, 4096))


def _short(file: FaultyScratch) -> None:
    file.short = True


def _stale(file: FaultyScratch) -> None:
    file.stale = {at: bytes(4096) for at in range(0, file.size, 4096)}


@pytest.mark.parametrize("fault", [_eio, _flipped, _short, _stale])
def test_what_cannot_be_read_is_read_by_the_model(fault: Any, engine: Engine) -> None:
    for number in (0, 2, 3):
        ask(engine, number)
    assert of_prefixes(engine).disk_blocks > 5
    fault(file_of(engine))
    before = of_prefixes(engine).returned
    for number in (0, 2, 1):
        ask(engine, number)
    assert of_prefixes(engine).lost > 0
    assert of_prefixes(engine).returned == before


def test_writes_that_fail_are_misses(engine: Engine) -> None:
    ask(engine, 0)
    file_of(engine).fails = [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) for _ in range(200)]
    for number in (2, 3):
        ask(engine, number)
    file_of(engine).fails = []
    for number in (0, 2, 3, 0):
        ask(engine, number)
    found = of_prefixes(engine)
    assert found.lost > 0
    assert found.returned > 0, "later blocks are written again"


def test_a_full_disk_stops_storing_and_not_answering(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millpond.cache.tiered.block_store.GRAIN", 4096)
    FaultyScratch.full = 32 << 10
    shared = [ask(engine, number) for number in (0, 2, 3, 1, 0, 2)]
    assert of_prefixes(engine).disk_bytes == 32 << 10, "what there is stays in use"
    assert sum(shared) > 0


# ---------------------------------------------------------------------- options


def test_what_is_refused(tmp_path: Path) -> None:
    model = shared_model("llama")
    with pytest.raises(OptionError, match="give prefix_cache=True"):
        Engine(model, prefix_disk="1GiB")
    with pytest.raises(OptionError, match="give its size"):
        Engine(model, prefix_cache=True, prefix_folder=tmp_path)
    with pytest.raises(BudgetError):
        Engine(model, prefix_cache=True, prefix_disk="many")
    with pytest.raises(OptionError, match="no such folder"):
        Engine(model, prefix_cache=True, prefix_disk="1GiB", prefix_folder=tmp_path / "not-there")


def test_inside_a_memory_limit(tmp_path: Path) -> None:
    """The slots are counted, and the folder is that of `disk=`."""
    shared_model("llama").save_pretrained(tmp_path / "m")
    with mp.LLM(
        tmp_path / "m", memory="32MiB", disk=tmp_path, prefix_cache=True, prefix_disk="1MiB", machine=EXAMPLE
    ) as llm:
        assert llm.plan is not None
        assert llm.plan.bytes["host"]["slots for prompts"] == STORE_BYTES
        assert llm.engine.config.prefix_folder == tmp_path
        assert sum(llm.plan.bytes["host"].values()) <= 32 << 20
    with pytest.raises(BudgetError, match=rf"prefix_disk= takes {STORE_BYTES:,} bytes of memory for slots"):
        mp.LLM(tmp_path / "m", memory=1 << 20, prefix_cache=True, prefix_disk="1MiB", machine=EXAMPLE)


# ---------------------------------------------------------------------- the tree alone


class PrefixTreeMachine(RuleBasedStateMachine):
    """Keeps, evicts, brings back, shortens and loses blocks of random texts; each holds what was written for it."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(2, 2, torch.float32, slots=2)
        self.held: list[PageTable] = []
        self.request = 0

    @initialize(capacity=st.sampled_from([0, 3, 8, 20]))
    def begin(self, capacity: int) -> None:
        FaultyScratch.full = None
        self.file: Any = None

        def opened(folder: Path) -> FaultyScratch:
            self.file = FaultyScratch(folder)
            return self.file  # type: ignore[no-any-return]

        self.store = BlockStore(Path(tempfile.gettempdir()), capacity * 4096, open_file=opened)
        self.tree = PrefixTree(store=self.store)

    @staticmethod
    def content(text: tuple[int, ...]) -> float:
        """What the pages of the last block of a text hold."""
        return float(sum((token + 1) * 7**place for place, token in enumerate(text)))

    def text(self, seed: int) -> np.ndarray:
        """Two to eight tokens of two kinds, so that beginnings are common."""
        draw = np.random.default_rng(seed)
        return draw.integers(0, 2, 2 * int(draw.integers(1, 5))).astype(np.int64)

    def path(self, text: np.ndarray) -> list[PrefixNode]:
        return self.tree.find("kind", text, 2)

    @rule(seed=st.integers(0, 12), hold=st.booleans())
    def keep(self, seed: int, hold: bool) -> None:
        text = self.text(seed)
        self.request += 1
        known = self.path(text)
        stored = self.tree.find_stored("kind", text, 2, known)
        path = self.tree.load(known, stored, lambda pages: True, self.request)
        fresh = self.pool.allocate(2 * (len(text) // 2 - len(path)))
        for number in range(len(path), len(text) // 2):
            ids = fresh[2 * (number - len(path)) :][:2]
            value = self.content(tuple(text[: 2 * number + 2].tolist()))
            arrays = read_pages(self.pool, ids)
            write_pages(self.pool, ids, tuple(torch.full_like(array, value) for array in arrays))
        old = np.concatenate([block.pages[0] for block in path]) if path else fresh[:0]
        self.pool.retain(old)
        columns = np.concatenate([old, fresh]).reshape(-1, 2).T
        table = PageTable.of_pages(self.pool, columns)
        self.pool.release(columns.ravel())
        self.tree.keep("kind", text, [table], self.request)
        if hold:
            self.held.append(table)
        else:
            table.clear()

    @rule(which=st.integers(0, 9))
    def end(self, which: int) -> None:
        if self.held:
            self.held.pop(which % len(self.held)).clear()

    @rule(n=st.integers(0, 4))
    def evict(self, n: int) -> None:
        before = len(self.tree)
        self.tree.evict(lambda: len(self.tree) <= before - n)

    @rule(seed=st.integers(0, 12))
    def shorten(self, seed: int) -> None:
        self.tree.shorten(self.path(self.text(seed)))

    @rule(place=st.integers(0, 5), kind=st.sampled_from(["bad", "flipped"]))
    def damage(self, place: int, kind: str) -> None:
        getattr(self.file, kind).add(place * 4096)

    @rule()
    def repair(self) -> None:
        self.file.bad.clear()
        self.file.flipped.clear()

    @invariant()
    def blocks_hold_what_was_written(self) -> None:
        if not hasattr(self, "tree"):
            return
        for block in self.tree._blocks.values():
            text: tuple[int, ...] = ()
            above: PrefixNode | None = block
            while above is not None:
                text = tuple(np.frombuffer(above.key[2], dtype=np.int64).tolist()) + text  # type: ignore[arg-type]
                above = above.parent
            assert block.parent is None or self.tree._blocks[block.parent.key] is block.parent
            if block.stored is None:
                for array in read_pages(self.pool, block.pages[0]):
                    assert bool((array == torch.full_like(array, self.content(text))).all())
                assert block.parent is None or block.parent.stored is None
            else:
                assert block.parent is None or block.parent.stored is None or block in block.parent.below

    @invariant()
    def nothing_leaks(self) -> None:
        if not hasattr(self, "tree"):
            return
        self.pool.check_integrity([*self.tree.held_in(self.pool), *(table.held() for table in self.held)])
        assert len(self.store) == self.tree.n_stored
        assert self.store.bytes_used == 4096 * len(self.store)
        assert self.store._extents.size <= self.store._capacity

    def teardown(self) -> None:
        if hasattr(self, "tree"):
            self.tree.clear()
            assert (len(self.tree), self.tree.n_stored, self.store.bytes_used) == (0, 0, 0)
            self.store.close()


TestPrefixTree = PrefixTreeMachine.TestCase
TestPrefixTree.settings = settings(max_examples=examples(40), stateful_step_count=40)
