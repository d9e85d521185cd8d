"""Prefix tree of the pages of prompts, shared by later prompts with the same beginning.

What a page of a prompt holds before anything is planned depends on the tokens up to its end alone. So these pages are
kept by a chain of blocks, one page per layer and head for each block of tokens, and a prompt that begins with known
blocks takes them over instead of reading them. They are never written: a plan writes what it keeps to pages of the
request's own, and a token behind a full block goes to a new page.

With a store, blocks that leave the memory go to a disk and come back when a prompt begins with them. All blocks behind
one on the disk are there too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from millpond.cache.pages.memory_limit import SumMemory
from millpond.cache.pages.page_table import PageTable
from millpond.cache.pages.pool import PageIds, PagePool
from millpond.cache.pages.ref_counted_pool import Pool, RefCountedPool
from millpond.cache.paging.lru import LeastRecentlyUsed
from millpond.cache.paging.rule import PageFacts, PagingRule
from millpond.cache.state.prompt_sums import PromptSums, SumKind
from millpond.cache.tiered.block_store import BlockStore, StoredBlock, unpack
from millpond.errors import DataError

Ids = npt.NDArray[np.int64]
#: How many pages of each pool.
Pages = dict[Pool, int]


@dataclass(slots=True, eq=False)
class PrefixNode:
    """One block of tokens behind a certain text: which pages hold it, per layer one for each KV head.

    Attributes:
        number: under which the paging rule knows it; used again once the block is gone.
        hash: of its tokens and all before them, 64 bits.
        n_children: blocks in memory that follow it. request: the last one that used it.
        sums: over the queries of all tokens up to its end, by what is summed, where a prompt had a breakpoint.
        stored: where it lies on the disk; None: in memory. below: blocks on the disk that follow it.
    """

    key: tuple[Hashable, ...]
    parent: PrefixNode | None
    pools: list[PagePool] = field(repr=False)
    pages: list[PageIds] = field(repr=False)
    number: int
    hash: int
    n_children: int = 0
    request: int = -1
    sums: dict[SumKind, PromptSums] = field(default_factory=dict, repr=False)
    stored: StoredBlock | None = None
    below: dict[PrefixNode, None] = field(default_factory=dict, repr=False)


class PrefixTree:
    """Blocks by what they hold, exactly: no hash stands for the tokens. Holds its pages until they are evicted.

    Args:
        rule: which block is evicted of those that none follows and no request holds; None: the longest unused.
        sum_memory: what counts the bytes of sums; None: one of its own.
        store: where blocks go that leave the memory, without their sums; None: they are forgotten.

    Attributes:
        evicted: blocks that were evicted by the rule so far. sum_memory: counts the bytes of sums.
        returned: blocks that came back from the disk. lost: blocks on the disk that could not be read.
    """

    def __init__(
        self, rule: PagingRule | None = None, sum_memory: SumMemory | None = None, store: BlockStore | None = None
    ) -> None:
        self._rule = rule or LeastRecentlyUsed()
        self.sum_memory = sum_memory or SumMemory()
        self._store = store
        self.returned = self.lost = 0
        self._blocks: dict[tuple[Hashable, ...], PrefixNode] = {}
        self._numbered: list[PrefixNode | None] = []
        self._unused: list[int] = []  # numbers
        self._in_use: dict[PrefixNode, None] = {}  # chosen by the rule, but requests hold all their pages
        self._releases: dict[PagePool, int] = {}  # of their pools when they were last looked at
        self._requests = self.evicted = 0

    def __len__(self) -> int:
        """Blocks in memory."""
        return len(self._numbered) - len(self._unused)

    @property
    def n_stored(self) -> int:
        """Blocks on the disk."""
        return len(self._blocks) - len(self)

    def find(self, kind: Hashable, tokens: Ids, slots: int) -> list[PrefixNode]:
        """The blocks of `slots` tokens that this text begins with, as far as they are known and in memory.

        kind: of entries: blocks of different kinds are never taken for each other.
        """
        found: list[PrefixNode] = []
        for begin in range(0, len(tokens) - slots + 1, slots):
            node = self._blocks.get(_key(kind, found[-1] if found else None, tokens[begin : begin + slots]))
            if node is None or node.stored is not None:
                break
            found.append(node)
        return found

    def find_stored(self, kind: Hashable, tokens: Ids, slots: int, path: list[PrefixNode]) -> list[PrefixNode]:
        """The blocks on the disk with which this text goes on behind `path`, which `find` returned."""
        found: list[PrefixNode] = []
        last = path[-1] if path else None
        for begin in range(len(path) * slots, len(tokens) - slots + 1, slots):
            last = self._blocks.get(_key(kind, last, tokens[begin : begin + slots]))
            if last is None:
                break
            found.append(last)
        return found

    def load(
        self, path: list[PrefixNode], stored: list[PrefixNode], room: Callable[[Pages], bool], request: int
    ) -> list[PrefixNode]:
        """Put blocks of the disk into memory again; returns the path with those that came.

        One that cannot be read is forgotten, with all that follow it.

        Args:
            path, stored: from `find` and `find_stored`. room: whether there is room for pages, or will be without other
                blocks. request: that uses them.
        """
        if self._store is None or not stored:
            return path
        for node in reversed(stored):  # so that none makes room before those behind it
            assert node.stored is not None, "it is on the disk"
            self._store.use(node.stored)
        for node in path:  # which must stay meanwhile
            _retain(node)
        found = list(path)
        for node in stored:
            if not self._load_node(node, room):
                break
            found.append(node)
        for node in path:
            _release(node)
        if len(found) > len(path):
            self._use(found, len(found), request)
        return found

    def new_request(self) -> int:
        """A number for a request that keeps its prompt in several parts."""
        self._requests += 1
        return self._requests

    def keep(
        self, kind: Hashable, tokens: Ids, tables: list[PageTable], request: int | None = None
    ) -> list[PrefixNode]:
        """Hold the full blocks of a prompt of one sequence, `tables` of all layers, of which nothing has left.

        The tables share these pages from now on. The paging rule sees one access to each block. Returns the blocks.

        request: the same for each part of one prompt, which begins with the parts before it; None: this is all of it.
        """
        slots = tables[0].pool.slots
        path = self.find(kind, tokens, slots)
        known = len(path)
        for number in range(known, len(tokens) // slots):
            pages = [table.page_column(number) for table in tables]
            part = tokens[number * slots : (number + 1) * slots]
            path.append(self._add(kind, path[-1] if path else None, part, [table.pool for table in tables], pages))
        for table in tables:
            table.share()
        self._use(path, known, self.new_request() if request is None else request)
        return path

    def keep_sums(self, node: PrefixNode, kind: SumKind, sums: PromptSums) -> None:
        """Keep sums at the end of a block, until it is evicted; those that are there already stay."""
        if kind not in node.sums:
            node.sums[kind] = sums
            self.sum_memory.take(sums.nbytes)

    def evict(self, enough: Callable[[], bool]) -> bool:
        """Release blocks in the order of the rule, none before those after it, until there is `enough`.

        Blocks whose pages are all held by requests as well stay: without them no page would be free.

        Returns:
            Whether there is enough.
        """
        if enough():
            return True
        self._allow_released()
        while (number := self._rule.victim()) is not None:
            node = self._numbered[number]
            assert node is not None, "the rule forgets blocks that are gone"
            if not _alone(node):
                self._rule.forbid(number)
                self._in_use[node] = None
                continue
            self._drop(node)
            self.evicted += 1
            if enough():
                return True
        self._releases = self._count_releases()
        return False

    def shorten(self, path: list[PrefixNode]) -> bool:
        """Release the last block of a path, whoever holds its pages; False where none is left or others follow it."""
        if not path or path[-1].n_children:
            return False
        self._drop(path.pop())
        return True

    def clear(self) -> None:
        """Release all, on the disk too."""
        while self._blocks:
            node = next(reversed(self._blocks.values()))  # followers came later
            if node.stored is None:
                self._leave(node)
            self._forget(node)

    def held_in(self, pool: RefCountedPool[Any]) -> list[PageIds]:
        """The pages of one pool that blocks hold."""
        return [
            ids
            for node in self._blocks.values()
            if node.stored is None
            for owner, ids in zip(node.pools, node.pages, strict=True)
            if owner is pool
        ]

    def follow(self, pool: RefCountedPool[Any], places: PageIds) -> None:
        """See `PageHolder`."""
        for ids in self.held_in(pool):
            ids[:] = places[ids]

    def check_sums(self) -> None:
        """Assert that the bytes of sums are those that are counted, and that no sums outlive those before them."""
        held = {id(sums): sums for node in self._blocks.values() for sums in node.sums.values()}
        self.sum_memory.check_integrity(sum(sums.nbytes for sums in held.values()))
        befores = [id(sums.before) for sums in held.values() if sums.before is not None]
        assert held.keys() >= set(befores), "sums without those before them"

    def _add(
        self, kind: Hashable, parent: PrefixNode | None, tokens: Ids, pools: list[PagePool], pages: list[PageIds]
    ) -> PrefixNode:
        key = _key(kind, parent, tokens)
        node = self._blocks.get(key)
        if node is None:
            chained = hash((kind, None if parent is None else parent.hash, key[-1])) & 0xFFFFFFFFFFFFFFFF
            node = self._blocks[key] = PrefixNode(key, parent, pools, pages, -1, chained)
        node.pools, node.pages = pools, pages
        for pool in set(pools):
            pool.holders.add(self)
        _retain(node)
        self._enter(node)
        return node

    def _enter(self, node: PrefixNode) -> None:
        """A block is in memory from now on, and no longer on the disk."""
        parent = node.parent
        if node.stored is not None:
            assert self._store is not None, "it is on the disk"
            self._store.free(node.stored)
            node.stored = None
            if parent is not None:
                del parent.below[node]
        if not self._unused:
            self._unused.append(len(self._numbered))
            self._numbered.append(None)
        node.number = self._unused.pop()
        self._numbered[node.number] = node
        if parent is not None:
            parent.n_children += 1
            if parent.n_children == 1 and parent.request >= 0:
                self._rule.forbid(parent.number)

    def _load_node(self, node: PrefixNode, room: Callable[[Pages], bool]) -> bool:
        """Read a block of the disk into fresh pages; False where there is no room, or it cannot be read."""
        assert self._store is not None, "it is on the disk"
        need: Counter[Pool] = Counter()
        for pool, n in zip(node.pools, [] if node.stored is None else node.stored.counts, strict=False):
            need[pool] += n
        if not room(dict(need)) or node.stored is None:  # it may have made room for those that left meanwhile
            return False
        try:
            data = self._store.read(node.stored)
        except DataError:
            self.lost += 1
            self._forget(node)
            return False
        node.pages = [pool.allocate(n) for pool, n in zip(node.pools, node.stored.counts, strict=True)]
        unpack(node.pools, node.pages, data)
        self._enter(node)
        self.returned += 1
        return True

    def _drop(self, node: PrefixNode) -> None:
        """A block leaves the memory, for the disk where there is one."""
        stored = None
        if self._store is not None:
            stored = self._store.put(node.pools, node.pages, lambda: self._on_evicted(node))
        self._leave(node)
        if stored is None:
            return self._forget(node)
        node.stored = stored
        if node.parent is not None:
            node.parent.below[node] = None

    def _leave(self, node: PrefixNode) -> None:
        """A block gives its pages back."""
        _release(node)
        self.sum_memory.release(sum(sums.nbytes for sums in node.sums.values()))
        node.sums.clear()
        self._rule.drop(node.number)
        self._numbered[node.number] = None
        self._unused.append(node.number)
        self._in_use.pop(node, None)
        node.pages, node.request = [], -1
        parent = node.parent
        if parent is not None:
            parent.n_children -= 1
            if not parent.n_children:
                self._rule.allow(parent.number)

    def _on_evicted(self, node: PrefixNode) -> None:
        """The store gave a block up."""
        node.stored = None
        self._forget(node)

    def _forget(self, node: PrefixNode) -> None:
        """A block is not in memory, and no longer on the disk; so are those that follow it."""
        if node.parent is not None:
            node.parent.below.pop(node, None)
        gone = [node]
        while gone:
            node = gone.pop()
            if node.stored is not None:
                assert self._store is not None, "it is on the disk"
                self._store.free(node.stored)
                node.stored = None
            gone += node.below
            node.below = {}
            del self._blocks[node.key]

    def _use(self, path: list[PrefixNode], known: int, request: int) -> None:
        """A request uses these blocks, the first `known` of which were there before it."""
        for depth, node in enumerate(path):
            if node.request != request:
                node.request = request
                parent = -1 if node.parent is None else node.parent.number
                self._rule.touch(node.number, PageFacts(node.hash, parent, request, depth, len(path), known))
        if path and not path[-1].n_children:
            self._in_use.pop(path[-1], None)
            self._rule.allow(path[-1].number)

    def _allow_released(self) -> None:
        """Let the rule choose blocks again whose pages were held by requests, where some page was released since."""
        if not self._in_use or self._releases == (releases := self._count_releases()):
            return
        self._releases = releases
        for node in [node for node in self._in_use if _alone(node)]:
            del self._in_use[node]
            if not node.n_children:
                self._rule.allow(node.number)

    def _count_releases(self) -> dict[PagePool, int]:
        return {pool: pool.n_releases for node in self._in_use for pool in node.pools}


def _retain(node: PrefixNode) -> None:
    for pool, ids in zip(node.pools, node.pages, strict=True):
        pool.retain(ids)


def _release(node: PrefixNode) -> None:
    for pool, ids in zip(node.pools, node.pages, strict=True):
        pool.release(ids)


def _alone(node: PrefixNode) -> bool:
    """Whether memory is free without a block: some page has no other holder, or there are sums."""
    return bool(node.sums) or any(
        bool((pool.refs(ids) == 1).any()) for pool, ids in zip(node.pools, node.pages, strict=True)
    )


def tables_of(path: list[PrefixNode]) -> list[PageTable]:
    """New tables of one sequence, one per layer, that hold the blocks of a path."""
    tables = []
    for layer, pool in enumerate(path[0].pools):
        columns = np.stack([node.pages[layer] for node in path], 1)
        tables.append(PageTable.of_pages(pool, columns))
    return tables


def _key(kind: Hashable, parent: PrefixNode | None, tokens: Ids) -> tuple[Hashable, ...]:
    return kind, None if parent is None else id(parent), tokens.tobytes()
