"""Prefix tree of the pages of prompts, shared by later prompts with the same beginning.

What a page of a prompt holds before anything is planned depends on the tokens up to its end alone. So these pages are
kept by a chain of nodes, one page per layer and head for each block of tokens, and a prompt that begins with the tokens
of cached nodes takes over their pages instead of reading the tokens. Shared pages are never written: a plan writes what
it keeps to pages of the request's own, and a token after a full block goes to a new page.

With a store, nodes that are evicted from memory are written to a disk and read again when a prompt begins with them.
All nodes after one on the disk are there too.

With a storage codec, nodes that nobody uses get codes. Such a node can do without its pages, and has them again,
decoded, when a prompt begins with it. What is computed behind decoded nodes is of a kind of its own (`Behind`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any

from millpond.cache.node_codes import NodeCodes
from millpond.cache.pages.memory_limit import SumMemory
from millpond.cache.pages.pool import PageIds
from millpond.cache.pages.ref_counted_pool import Pool, RefCountedPool
from millpond.cache.paging.lru import LeastRecentlyUsed
from millpond.cache.paging.rule import PageFacts, PagingRule
from millpond.cache.prefix_node import Behind, Coding, Ids, Pages, PrefixNode, SharedPages, key_of
from millpond.cache.state.prompt_sums import PromptSums, SumKind
from millpond.cache.state.sum_bytes import pack_sums, unpack_sums
from millpond.cache.tiered.block_store import BlockStore, unpack
from millpond.errors import DataError


class PrefixTree:
    """Nodes by their exact tokens, whose pages it holds until they are evicted.

    Args:
        rule: Rule that chooses which node is evicted among those without followers and requests; None for the least
            recently used.
        sum_memory: Counter of the bytes of sums; None for one of its own.
        store: Store of evicted nodes, without their sums; None to drop them.
        codes: Codes of nodes; None: nodes are not coded.

    Attributes:
        evicted: Nodes that were evicted by the rule so far.
        sum_memory: Counter of the bytes of sums.
        returned: Nodes that were read from the disk again.
        lost: Nodes on the disk that could not be read.
    """

    def __init__(
        self,
        rule: PagingRule | None = None,
        sum_memory: SumMemory | None = None,
        store: BlockStore | None = None,
        codes: NodeCodes | None = None,
    ) -> None:
        self._rule = rule or LeastRecentlyUsed()
        self.sum_memory = sum_memory or SumMemory()
        self._store, self.codes = store, codes
        self.returned = self.lost = 0
        self._blocks: dict[tuple[Hashable, ...], PrefixNode] = {}
        self._numbered: list[PrefixNode | None] = []
        self._unused: list[int] = []  # numbers
        self._in_use: dict[PrefixNode, None] = {}  # chosen by the rule, but requests hold all their pages
        self._releases: dict[RefCountedPool[Any], int] = {}  # of their pools when they were last looked at
        self._pools: set[RefCountedPool[Any]] = set()
        self._requests = self.evicted = 0

    def __len__(self) -> int:
        """Return the number of nodes in memory."""
        return len(self._numbered) - len(self._unused)

    @property
    def n_live(self) -> int:
        """Nodes with pages."""
        return len(self) - (0 if self.codes is None else self.codes.n_alone)

    @property
    def n_stored(self) -> int:
        """Nodes on the disk."""
        return len(self._blocks) - len(self)

    def find(self, kind: Hashable, tokens: Ids, slots: int, *, behind: bool = False) -> list[PrefixNode]:
        """Return the nodes in memory, of `slots` tokens each, with which this text begins.

        Args:
            kind: Kind of entries; nodes of different kinds are never taken for each other.
            tokens: Ids of the text.
            slots: Tokens of a node.
            behind: Whether nodes behind decoded ones may be among them, where there is no other.
        """
        path: list[PrefixNode] = []
        for begin in range(0, len(tokens) - slots + 1, slots):
            node = self._follower(kind, path[-1] if path else None, tokens[begin : begin + slots], behind)
            if node is None or node.stored is not None:
                break
            path.append(node)
        return path

    def _follower(self, kind: Hashable, parent: PrefixNode | None, tokens: Ids, behind: bool) -> PrefixNode | None:
        node = self._blocks.get(key_of(kind, parent, tokens))
        if behind and (node is None or node.stored is not None):
            node = self._blocks.get(key_of(Behind(kind), parent, tokens), node)
        return node

    def find_stored(self, kind: Hashable, tokens: Ids, slots: int, path: list[PrefixNode]) -> list[PrefixNode]:
        """Return the nodes on the disk with which this text continues after `path` of `find`."""
        stored: list[PrefixNode] = []
        last = path[-1] if path else None
        for begin in range(len(path) * slots, len(tokens) - slots + 1, slots):
            last = self._follower(kind, last, tokens[begin : begin + slots], self.codes is not None)
            if last is None or last.stored is None:
                break
            stored.append(last)
        return stored

    def load(
        self, path: list[PrefixNode], stored: list[PrefixNode], room: Callable[[Pages], bool], request: int
    ) -> list[PrefixNode]:
        """Read nodes from the disk into memory; return the path with those that were read.

        A node that cannot be read is dropped, with all that follow it.

        Args:
            path: Nodes that `find` returned.
            stored: Nodes that `find_stored` returned.
            room: Function that says whether there is room for pages, or will be after other nodes are evicted.
            request: Request that uses the nodes.
        """
        if self._store is None or not stored:
            return path
        for node in reversed(stored):  # so that none makes room before those behind it
            assert node.stored is not None, "it is on the disk"
            self._store.use(node.stored)
        for node in path:  # which must stay meanwhile
            node.retain()
        longer = list(path)
        for node in stored:
            if not self._load_node(node, room):
                break
            longer.append(node)
        for node in path:
            node.release()
        if len(longer) > len(path):
            self._use(longer, len(longer), request)
        return longer

    def new_request(self) -> int:
        """Return a number for a request that keeps its prompt in several parts."""
        self._requests += 1
        return self._requests

    def keep(
        self,
        kind: Hashable,
        tokens: Ids,
        tables: Sequence[SharedPages],
        request: int | None = None,
        slots: int | None = None,
        coding: Coding | None = None,
        behind: int | None = None,
    ) -> list[PrefixNode]:
        """Hold the full blocks of a prompt of one sequence, and return their nodes.

        The tables share these pages from now on. The paging rule sees one access to each node.

        Args:
            kind: Kind of entries.
            tokens: Ids of the prompt.
            tables: Tables of all layers, from which nothing was evicted.
            request: Number shared by all parts of one prompt, which begin with the parts before them; None if this is
                all of it.
            slots: Tokens of a block; None: those of a page.
            coding: What a storage codec needs of new nodes; None: they are not coded.
            behind: Number of the block from which on those of the prompt are decoded or behind decoded ones; None: none
                are.
        """
        slots = slots or tables[0].pool.slots
        path = self.find(kind, tokens, slots, behind=behind is not None)
        num_cached = len(path)
        exact = None if coding is None or num_cached == len(tokens) // slots else coding.exact()
        for number in range(num_cached, len(tokens) // slots):
            pages = [table.page_column(number) for table in tables]
            own = slice(number * slots, (number + 1) * slots)
            of_kind = kind if behind is None or number < behind else Behind(kind)
            node = self._add(of_kind, path[-1] if path else None, tokens[own], [table.pool for table in tables], pages)
            if coding is not None and exact is not None and number >= coding.first:
                node.exact, node.bases = exact[:, own].clone(), coding.bases
            path.append(node)
        for table in tables:
            table.share()
        self._use(path, num_cached, self.new_request() if request is None else request)
        return path

    def keep_sums(self, node: PrefixNode, kind: SumKind, sums: PromptSums) -> None:
        """Keep sums at the end of a node until it is evicted; existing ones stay."""
        if kind not in node.sums:
            node.sums[kind] = sums
            self.sum_memory.take(sums.nbytes)

    def evict(self, enough: Callable[[], bool]) -> bool:
        """Evict nodes in the order of the rule until there is `enough`, followers first.

        Nodes all of whose pages requests hold as well stay: their eviction would free no page.

        Returns:
            Whether there is enough.
        """
        if enough():
            return True
        if self.codes is not None:
            self.codes.press()
            if self.codes.drop_pages(enough):
                return True
        self._allow_released()
        while (number := self._rule.victim()) is not None:
            node = self._numbered[number]
            assert node is not None, "the rule forgets evicted nodes"
            if not node.frees_memory or self._is_pinned(node):
                self._rule.forbid(number)
                self._in_use[node] = None
                continue
            self._drop(node)
            self.evicted += 1
            if enough():
                return True
        self._releases = self._count_releases()
        return False

    @property
    def n_releases(self) -> int:
        """Releases of pages so far, by whichever holder, in the pools of all nodes."""
        return sum(pool.n_releases for pool in self._pools)

    def release_unheld(self, wanted: Collection[PrefixNode]) -> None:
        """Drop nodes of which a page has no other holder, unless they are `wanted`.

        Followers go first. Wanted ones are evicted like others where memory is needed.
        """
        kept: list[PrefixNode] = []
        for leaf in [held for held in self._in_use if not held.n_children]:
            self._rule.allow(leaf.number)
        self._in_use.clear()
        while (number := self._rule.victim()) is not None:
            node = self._numbered[number]
            assert node is not None, "the rule forgets dropped nodes"
            if not node.is_unheld:
                self._rule.forbid(number)
                self._in_use[node] = None
            elif node in wanted:
                self._rule.forbid(number)
                kept.append(node)
            else:
                self._drop(node)
        for node in kept:
            self._rule.allow(node.number)
        self._releases = self._count_releases()

    def drop_end(self, path: list[PrefixNode], n: int, holders: int) -> None:
        """Drop nodes at the end of a path whose pages have at most `holders` holders.

        The first `n` nodes stay.
        """
        while len(path) > n and path[-1].most_holders <= holders and self.shorten(path):
            pass

    def shorten(self, path: list[PrefixNode]) -> bool:
        """Evict the last node of a path, whoever holds its pages.

        Returns:
            False if the path is empty, or other nodes follow its last.
        """
        if not path or path[-1].n_children:
            return False
        self._drop(path.pop())
        return True

    def revive(self, node: PrefixNode, counts: Sequence[int], room: Callable[[Pages], bool]) -> bool:
        """Give a node with codes fresh pages, which the caller writes.

        Returns whether there was room.

        Args:
            node: The node.
            counts: Its pages of each layer.
            room: See `load`.
        """
        assert self.codes is not None, "it has codes"
        need: Counter[Pool] = Counter()
        for pool, n in zip(node.pools, counts, strict=True):
            need[pool] += n
        if not room(dict(need)) or node.codes is None:  # room may be made by its own eviction
            return False
        node.pages = [pool.allocate(n) for pool, n in zip(node.pools, counts, strict=True)]
        node.decoded = True
        self.codes.got_pages(node)
        return True

    def holds(self, node: PrefixNode) -> bool:
        """Return whether a node is in the tree."""
        return self._blocks.get(node.key) is node

    def drop_from(self, node: PrefixNode) -> None:
        """Remove a node with all that follow it, in memory and on the disk."""
        followers: dict[PrefixNode | None, list[PrefixNode]] = {}
        for other in self._blocks.values():
            followers.setdefault(other.parent, []).append(other)
        removed = [node]
        for one in removed:  # grows
            removed += followers.get(one, [])
        for one in reversed(removed):
            if one.stored is None:
                self._leave(one)
            self._forget(one)

    def clear(self) -> None:
        """Remove all nodes, those on the disk too."""
        while self._blocks:
            node = next(reversed(self._blocks.values()))  # followers came later
            if node.stored is None:
                self._leave(node)
            self._forget(node)

    def held_in(self, pool: RefCountedPool[Any]) -> list[PageIds]:
        """Return the pages of one pool that nodes hold."""
        return [ids for node in self._blocks.values() for owner, ids in node.held() if owner is pool]

    def follow(self, pool: RefCountedPool[Any], new_ids: PageIds) -> None:
        """See `PageHolder`."""
        for ids in self.held_in(pool):
            ids[:] = new_ids[ids]

    def check_sums(self) -> None:
        """Assert that all bytes of sums are counted, and that no sums outlive those before them."""
        held = {id(sums): sums for node in self._blocks.values() for sums in node.sums.values()}
        self.sum_memory.check_integrity(sum(sums.nbytes for sums in held.values()))
        befores = [id(sums.before) for sums in held.values() if sums.before is not None]
        assert held.keys() >= set(befores), "sums without those before them"
        if self.codes is not None:
            self.codes.check_integrity([node for node in self._blocks.values() if node.stored is None])

    def _add(
        self,
        kind: Hashable,
        parent: PrefixNode | None,
        tokens: Ids,
        pools: list[RefCountedPool[Any]],
        pages: list[PageIds],
    ) -> PrefixNode:
        key = key_of(kind, parent, tokens)
        node = self._blocks.get(key)
        if node is None:
            chained = hash((kind, None if parent is None else parent.hash, key[-1])) & 0xFFFFFFFFFFFFFFFF
            node = self._blocks[key] = PrefixNode(key, parent, pools, pages, -1, chained)
            node.depth = 0 if parent is None else parent.depth + 1
        node.pools, node.pages, node.decoded, node.exact = pools, pages, False, None
        for pool in set(pools):
            pool.holders.add(self)
        self._pools.update(pools)
        node.retain()
        self._enter(node)
        for height in (1, 2):
            if parent is not None and parent.height < height:
                parent.height = height
                if self.codes is not None:
                    self.codes.used(parent)
            parent = None if parent is None else parent.parent
        return node

    def _enter(self, node: PrefixNode) -> None:
        """Record that a node is in memory, and no longer on the disk."""
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
        """Read a node from the disk into fresh pages; False without room or if the read fails."""
        assert self._store is not None, "it is on the disk"
        need: Counter[Pool] = Counter()
        stored = node.stored
        for pool, n in zip(node.pools, [] if stored is None else stored.counts, strict=False):
            need[pool] += n
        if stored is not None and stored.sums:
            need[self.sum_memory] = sum(form.nbytes for form in stored.sums)
        if self.codes is not None and stored is not None and not stored.counts:
            need[self.codes.memory] = stored.nbytes
        if not room(dict(need)) or stored is None or node.stored is None:  # it made room for those that left meanwhile
            return False
        try:
            data = self._store.read(stored)
        except DataError:
            self.lost += 1
            self._forget(node)
            return False
        if stored.counts:
            node.pages = [pool.allocate(n) for pool, n in zip(node.pools, stored.counts, strict=True)]
            unpack(node.pools, node.pages, data[: stored.nbytes])
        self._enter(node)
        if not stored.counts:
            assert self.codes is not None, "it was coded"
            self.codes.take(node, data[: stored.nbytes].clone() if stored.sums else data)
        device = node.pools[0].arrays.device
        for kind, sums in unpack_sums(data[stored.nbytes :], stored.sums, device).items():
            self.keep_sums(node, kind, sums)
        self.returned += 1
        return True

    def _drop(self, node: PrefixNode) -> None:
        """Evict a node from memory, to the disk if there is a store."""
        stored = None
        if self._store is not None:
            sums = None if self.codes is None or not node.sums else pack_sums(node.sums)
            if node.codes is None:
                stored = self._store.put(node.pools, node.pages, lambda: self._on_evicted(node), sums)
            else:
                stored = self._store.put_codes(node.codes, lambda: self._on_evicted(node), sums)
        self._leave(node)
        if stored is None:
            return self._forget(node)
        node.stored = stored
        if node.parent is not None:
            node.parent.below[node] = None

    def _leave(self, node: PrefixNode) -> None:
        """Release the pages and codes of a node."""
        node.release()
        if self.codes is not None:
            self.codes.left(node)
        self.sum_memory.release(sum(sums.nbytes for sums in node.sums.values()))
        node.sums.clear()
        self._rule.drop(node.number)
        self._numbered[node.number] = None
        self._unused.append(node.number)
        self._in_use.pop(node, None)
        node.pages, node.request, node.decoded = [], -1, False
        parent = node.parent
        if parent is not None:
            parent.n_children -= 1
            if not parent.n_children:
                self._rule.allow(parent.number)

    def _on_evicted(self, node: PrefixNode) -> None:
        """Forget a node that the store evicted."""
        node.stored = None
        self._forget(node)

    def _forget(self, node: PrefixNode) -> None:
        """Remove a node that is not in memory, and all that follow it, from the disk."""
        if node.parent is not None:
            node.parent.below.pop(node, None)
        removed = [node]
        while removed:
            node = removed.pop()
            if node.stored is not None:
                assert self._store is not None, "it is on the disk"
                self._store.free(node.stored)
                node.stored = None
            removed += node.below
            node.below = {}
            del self._blocks[node.key]

    def _use(self, path: list[PrefixNode], num_cached: int, request: int) -> None:
        """Record that a request uses these nodes, of which `num_cached` existed before it."""
        for depth, node in enumerate(path):
            if node.request != request:
                node.request = request
                parent = -1 if node.parent is None else node.parent.number
                self._rule.touch(node.number, PageFacts(node.hash, parent, request, depth, len(path), num_cached))
            if self.codes is not None:
                self.codes.used(node)
        if path and not path[-1].n_children:
            self._in_use.pop(path[-1], None)
            self._rule.allow(path[-1].number)

    def _allow_released(self) -> None:
        """Let the rule choose nodes again of whose pages requests have released some."""
        if not self._in_use or self._releases == (releases := self._count_releases()):
            return
        self._releases = releases
        for node in [node for node in self._in_use if node.frees_memory and not self._is_pinned(node)]:
            del self._in_use[node]
            if not node.n_children:
                self._rule.allow(node.number)

    def _is_pinned(self, node: PrefixNode) -> bool:
        return self.codes is not None and node in self.codes.pinned

    def _count_releases(self) -> dict[RefCountedPool[Any], int]:
        return {pool: pool.n_releases for node in self._in_use for pool in node.pools}
