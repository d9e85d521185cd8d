"""Nodes of a prefix tree with codes: when they are due, what goes first, and that each holds what is its own."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from millpond.cache.node_codes import NodeCodes
from millpond.cache.pages.memory_limit import MemoryLimit, SumMemory
from millpond.cache.pages.page_table import PageTable
from millpond.cache.pages.pool import PagePool
from millpond.cache.prefix_node import Behind, Coding, PrefixNode
from millpond.cache.prefix_tree import PrefixTree
from millpond.cache.swap import read_pages, write_pages
from millpond.cache.tiered.block_store import BlockStore
from tests.helpers.examples import examples

SLOTS = 2


class Held:
    """A tree of blocks of two tokens, in one layer of two heads, with a clock that stands still."""

    def __init__(self, delay_s: float = 5.0, store: BlockStore | None = None) -> None:
        self.now = 0.0
        self.limit = MemoryLimit(None)
        self.pool = PagePool(2, 2, torch.float32, slots=SLOTS, memory_limit=self.limit)
        self.codes = NodeCodes(SumMemory(self.limit), delay_s, clock=lambda: self.now)
        self.tree = PrefixTree(store=store, codes=self.codes)
        self.store = store

    @staticmethod
    def content(text: tuple[int, ...]) -> float:
        return float(sum((token + 1) * 7**place for place, token in enumerate(text)) % 1_000_003)

    def table(self, text: np.ndarray, path: list[PrefixNode]) -> PageTable:
        """The table of a prompt that begins with a path with pages, and has read the rest."""
        fresh = self.pool.allocate(2 * (len(text) // SLOTS - len(path)))
        for number in range(len(path), len(text) // SLOTS):
            self.write(
                fresh[2 * (number - len(path)) :][:2], self.content(tuple(text[: SLOTS * (number + 1)].tolist()))
            )
        old = np.concatenate([block.pages[0] for block in path]) if path else fresh[:0]
        self.pool.retain(old)
        ids = np.concatenate([old, fresh])
        table = PageTable.of_pages(self.pool, ids.reshape(-1, 2).T)
        self.pool.release(ids)
        return table

    def write(self, ids: np.ndarray, value: float) -> None:
        arrays = read_pages(self.pool, ids)
        write_pages(self.pool, ids, tuple(torch.full_like(array, value) for array in arrays))

    def keep(self, text: np.ndarray, request: int, behind: int | None = None) -> PageTable:
        known = self.tree.find("kind", text, SLOTS, behind=True)
        path = self.tree.load(known, self.tree.find_stored("kind", text, SLOTS, known), lambda pages: True, request)
        for node in path:
            if not node.pages:
                assert self.tree.revive(node, [2], lambda pages: True)
                assert node.codes is not None
                self.write(node.pages[0], float(node.codes.view(torch.float64)))
        table = self.table(text, path)
        exact = torch.zeros(1, len(text), dtype=torch.bool)
        self.tree.keep("kind", text, [table], request, coding=Coding(lambda: exact, [None]), behind=behind)
        return table

    def code_due(self, most: int = 3) -> list[PrefixNode]:
        nodes = self.codes.due(most)
        for node in nodes:
            value = read_pages(self.pool, node.pages[0])[0].flatten()[0]
            self.codes.take(node, value.double().reshape(1).view(torch.uint8))
        return nodes

    def path(self, *tokens: int) -> list[PrefixNode]:
        return self.tree.find("kind", np.array(tokens), SLOTS, behind=True)


TEXT = np.array([0, 0, 1, 1, 2, 2, 3, 3, 4, 4])


def test_the_last_blocks_and_those_in_use_wait() -> None:
    held = Held()
    table = held.keep(TEXT, 1)
    assert held.codes.due_s == 5.0
    held.now = 4.9
    assert held.codes.due(9) == []
    held.now = 5.0
    assert held.codes.due(9) == []  # a request holds them
    table.clear()
    held.now = 10.0
    path = held.path(*TEXT.tolist())
    assert held.code_due(2) == path[:2]
    assert held.code_due(9) == path[2:3]
    assert held.codes.due_s is None
    held.keep(np.append(TEXT, [5, 5]), 2).clear()  # one more follows the last two
    held.now = 16.0
    assert held.code_due(9) == path[3:4]
    held.tree.clear()


def test_pages_of_coded_nodes_go_first_and_come_back_decoded() -> None:
    held = Held(0.0)
    held.keep(TEXT, 1).clear()
    path = held.path(*TEXT.tolist())
    held.code_due(9)
    live = held.pool.n_live
    assert held.tree.evict(lambda: held.pool.n_live <= live - 6)
    assert [bool(node.pages) for node in path] == [False, False, False, True, True]
    assert held.path(*TEXT.tolist()) == path
    assert held.tree.evicted == 0
    held.keep(TEXT, 2).clear()
    assert [node.decoded for node in path] == [True, True, True, False, False]
    assert held.codes.due(9) == []  # nothing is coded twice
    held.codes.pinned.update(path)
    assert not held.tree.evict(lambda: held.pool.n_live < 8)
    held.codes.pinned.clear()
    assert held.tree.evict(lambda: held.pool.n_live == 0)
    assert (len(held.tree), held.codes.n_coded, held.codes.memory.nbytes) == (3, 3, 24)
    held.tree.clear()
    assert held.codes.memory.nbytes == 0


def test_blocks_behind_decoded_ones_are_not_taken_for_others() -> None:
    held = Held()
    text = np.array([0, 0, 1, 1, 2, 2])
    held.keep(text, 1, behind=1).clear()
    assert [isinstance(node.key[0], Behind) for node in held.path(0, 0, 1, 1, 2, 2)] == [False, True, True]
    assert len(held.tree.find("kind", text, SLOTS)) == 1
    held.tree.keep("kind", text, [held.table(text, [])], 2)  # one that has read all itself
    exact = held.tree.find("kind", text, SLOTS)
    assert len(exact) == 3
    assert held.path(0, 0, 1, 1, 2, 2) == exact
    assert len(held.tree) == 5


def test_blocks_do_not_wait_while_memory_is_short() -> None:
    held = Held()
    held.keep(TEXT, 1).clear()
    assert held.code_due() == []
    live = held.pool.n_live
    held.tree.evict(lambda: held.pool.n_live < live)
    assert len(held.tree) == 4
    assert held.codes.due_s == 0.0
    assert held.code_due() == held.path(*TEXT.tolist())[:3]
    held.keep(TEXT, 2).clear()
    assert held.codes.due_s is None
    held.keep(np.array([7, 7, 8, 8, 9, 9]), 3).clear()
    assert held.code_due() == []  # the delay is back


def test_what_was_decoded_is_not_coded_again() -> None:
    held = Held(0.0)
    exact = torch.zeros(1, len(TEXT), dtype=torch.bool)
    coding = Coding(lambda: exact, [None], first=2)
    held.tree.keep("kind", TEXT, [held.table(TEXT, [])], 1, coding=coding, behind=0)
    path = held.path(*TEXT.tolist())
    assert [node.exact is None for node in path] == [True, True, False, False, False]
    assert all(isinstance(node.key[0], Behind) for node in path)


def test_a_node_goes_with_all_that_follow_it(tmp_path: Path) -> None:
    held = Held(0.0, BlockStore(tmp_path, 1 << 20))
    for last in range(3):
        held.keep(np.append(TEXT, [last, last]), last).clear()
    while held.code_due():
        pass
    held.tree.evict(lambda: held.tree.n_stored == 2)
    assert held.tree.n_stored == 2
    held.tree.drop_from(held.path(*TEXT.tolist())[2])
    assert (len(held.tree), held.tree.n_stored) == (2, 0)
    held.tree.check_sums()
    assert held.store is not None
    assert len(held.store) == 0
    held.store.close()


class CodedTreeMachine(RuleBasedStateMachine):
    """Keeps, codes, evicts, brings back and drops blocks of random texts."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: list[PageTable] = []
        self.request = 0

    @initialize(capacity=st.sampled_from([0, 3, 8, 20]))
    def begin(self, capacity: int) -> None:
        self.held = Held(2.0, BlockStore(Path(tempfile.gettempdir()), capacity * 4096))

    def text(self, seed: int) -> np.ndarray:
        draw = np.random.default_rng(seed)
        return draw.integers(0, 2, SLOTS * int(draw.integers(1, 7))).astype(np.int64)

    @rule(seed=st.integers(0, 12), hold=st.booleans(), behind=st.sampled_from([None, 0, 2]))
    def keep(self, seed: int, hold: bool, behind: int | None) -> None:
        self.request += 1
        table = self.held.keep(self.text(seed), self.request, behind)
        if hold:
            self.tables.append(table)
        else:
            table.clear()

    @rule(which=st.integers(0, 9))
    def end(self, which: int) -> None:
        if self.tables:
            self.tables.pop(which % len(self.tables)).clear()

    @rule(seconds=st.sampled_from([0.5, 3.0]))
    def code(self, seconds: float) -> None:
        self.held.now += seconds
        for node in self.held.code_due():
            assert node.height == 2
            assert node.most_holders == 1

    @rule(n=st.integers(0, 6))
    def evict(self, n: int) -> None:
        before = self.held.pool.n_live
        self.held.tree.evict(lambda: self.held.pool.n_live <= before - n)

    @rule(n=st.integers(0, 3))
    def evict_nodes(self, n: int) -> None:
        before = len(self.held.tree)
        self.held.tree.evict(lambda: len(self.held.tree) <= before - n)

    @rule(which=st.integers(0, 99))
    def drop(self, which: int) -> None:
        coded = [node for node in self.nodes() if node.codes is not None]
        if coded and which < 20:
            self.held.tree.drop_from(coded[which % len(coded)])

    def nodes(self) -> list[PrefixNode]:
        return [*self.held.tree._blocks.values()] if hasattr(self, "held") else []

    @invariant()
    def blocks_hold_what_was_written(self) -> None:
        for node in self.nodes():
            text: tuple[int, ...] = ()
            above: PrefixNode | None = node
            while above is not None:
                text = tuple(np.frombuffer(above.key[2], dtype=np.int64).tolist()) + text  # type: ignore[arg-type]
                above = above.parent
            assert node.parent is None or self.held.tree.holds(node.parent)
            expected: Any = self.held.content(text)
            assert (node.stored is None) == bool(node.pages or node.codes is not None)
            for ids in node.pages:
                assert bool((read_pages(self.held.pool, ids)[0] == expected).all())
            if node.codes is not None:
                assert float(node.codes.view(torch.float64)) == expected
            assert not node.decoded or node.codes is not None

    @invariant()
    def nothing_leaks(self) -> None:
        if hasattr(self, "held"):
            held = [*self.held.tree.held_in(self.held.pool), *(table.held() for table in self.tables)]
            self.held.pool.check_integrity(held)
            self.held.tree.check_sums()
            assert self.held.store is not None
            assert len(self.held.store) == self.held.tree.n_stored

    def teardown(self) -> None:
        if hasattr(self, "held"):
            self.held.tree.clear()
            assert self.held.codes.memory.nbytes == 0
            assert self.held.store is not None
            self.held.store.close()


TestCodedTree = CodedTreeMachine.TestCase
TestCodedTree.settings = settings(max_examples=examples(40), stateful_step_count=40)
