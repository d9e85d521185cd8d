"""Prefix sharing: the common beginning of prompts is read once."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import replace
from itertools import islice

import torch

from millpond.cache.batch_cache import BatchCache, Pages
from millpond.cache.node_codes import NodeCodes
from millpond.cache.pages.memory_limit import MemoryLimit, SumMemory
from millpond.cache.paging.rule import PagingRule
from millpond.cache.prefix_node import Behind, Coding, PrefixNode, tables_of
from millpond.cache.prefix_tree import PrefixTree
from millpond.cache.state.prompt_sums import PromptSums, SumKind
from millpond.cache.tiered.block_store import BlockStore
from millpond.cache.tiered.coded_block import BlockCodec
from millpond.engine.coded_prefixes import CodedPrefixes
from millpond.engine.memory_estimate import keeps_pages, plan_pages
from millpond.engine.outputs import PrefixStats
from millpond.engine.prompt_marks import MAX_COMPARED, common_ends
from millpond.engine.request_state import RequestState
from millpond.engine.request_table import RequestTable
from millpond.engine.shared_codes import SharedCodes
from millpond.engine.sharing import can_code, can_share, sum_pages

#: Most blocks that are evicted for the sums of one breakpoint: pages of other blocks may hold their memory back.
MAX_EVICTED = 64


class PrefixCache:
    """Prefix tree of prompts, and the rules by which requests share their pages.

    The shared pages are those of a prompt before anything was planned; the plan of each request makes its own
    copies. Methods whose plan can be made of entries and of the queries of the prompt's end share every block. Those
    that sum over all queries share up to the breakpoints of prompts, where their sums are kept with the block.

    Args:
        memory_limit: Limit that all pools share.
        rule: Order in which blocks are evicted; None: nothing is shared at all.
        unit: Prompts take over multiples of this many tokens; a multiple of the entries of a page, or 1.
        store: Disk of the blocks that leave the memory; None: they are dropped.
        in_flight: All requests in flight, if only these share and blocks are dropped once none of them holds the pages
            or waits to begin with them (ChunkAttention, Ye et al., 2024, section 3.1); None: blocks are kept for later
            requests.
        codec: Codec of blocks that nobody uses; None: they stay as they are.
        delay_s: Seconds from the last use of a block until it is coded.

    Attributes:
        tree: The tree.
        coded: Coder of its blocks; None: they stay as they are.
    """

    def __init__(
        self,
        memory_limit: MemoryLimit,
        rule: PagingRule | None,
        unit: int = 1,
        store: BlockStore | None = None,
        in_flight: RequestTable | None = None,
        codec: BlockCodec | None = None,
        delay_s: float = 0.0,
    ) -> None:
        codes = None
        if codec is not None:
            codes = NodeCodes(SumMemory(memory_limit), delay_s, keeps_pages=memory_limit.limit_bytes is not None)
        self.tree = PrefixTree(rule, None if rule is None else SumMemory(memory_limit), store, codes)
        self.coded = None
        if codec is not None:
            self.coded = CodedPrefixes(self.tree, codec, self.make_room, memory_limit.make_room)
        self._store = store
        self._rule = rule
        self._hits = self._misses = 0
        self._memory_limit = memory_limit
        self._enabled = rule is not None
        self._unit = unit
        self._in_flight = in_flight
        self._codes = SharedCodes(unit)
        self._released: tuple[int, int] | None = None  # what the last `release_unheld` saw
        self._secret = secrets.token_bytes(32)

    def attach(self, state: RequestState) -> int:
        """Give a request that begins the pages that are known of its prompt, see `PromptSource`."""
        if not self._shares(state):
            return 0
        self._load_from_disk(state)
        path = self._with_pages(state, self._match_prefix(state))
        self._hits += len(path)
        self._misses += len(state.ids) // state.group.slots - len(path)
        if path:
            state.private_cache = state.group.cache_factory.make_cache(len(state.ids))
            sums = SumKind.of(state.group.cache_factory.policy)
            state.private_cache.begin_with(
                tables_of(path),
                torch.from_numpy(state.ids_array).to(path[0].pools[0].arrays.device),
                None if sums is None else path[-1].sums[sums].complete(),
            )
            self._begin_with_codes(state, path)
        return len(path) * state.group.slots

    def waits_for_codes(self, state: RequestState) -> bool:
        """Return whether a prompt that would begin waits for blocks that are being decoded."""
        if self.coded is None or state.group.cache_factory.slots is not None or not self._shares(state):
            return False
        self._load_from_disk(state)
        return not self.coded.prepare(self._match_prefix(state))

    def _with_pages(self, state: RequestState, path: list[PrefixNode]) -> list[PrefixNode]:
        """Return the beginning of a path that has pages, in whole units or to the last sums."""
        n = next((n for n, node in enumerate(path) if not node.pages), len(path))
        return path if n == len(path) else self._usable(state, path[:n])

    def _begin_with_codes(self, state: RequestState, path: list[PrefixNode]) -> None:
        """Take note of what a prompt has begun with: decoded blocks, and exact tokens."""
        if self.coded is None or state.private_cache is None:
            return
        decoded = [n for n, node in enumerate(path) if node.decoded or isinstance(node.key[0], Behind)]
        state.behind, state.begun_with = decoded[0] if decoded else None, len(path)
        state.decoded = sum(node.decoded for node in path) * state.group.slots
        self.coded.counts.decoded_tokens += state.decoded
        exact = [node.exact for node in path if node.exact is not None]
        if state.private_cache.samples is not None and len(exact) == len(path):
            state.private_cache.samples.begin_with(torch.cat(exact, 1))

    def cached_tokens(self, state: RequestState) -> int:
        """Return how many tokens at the beginning of a prompt have known pages."""
        return len(self._match_prefix(state)) * state.group.slots if self._enabled else 0

    def find_reader(self, state: RequestState, reading: Iterable[RequestState]) -> RequestState | None:
        """Return the request whose prefill will produce the next blocks of this prompt, or None."""
        if not self._shares(state):
            return None
        known, max_shared = self._num_expected_blocks(state) * state.group.slots, self._max_shared_tokens(state)
        return next((other for other in reading if self._will_help(state, other, known, max_shared)), None)

    def _will_help(self, state: RequestState, other: RequestState, known: int, max_shared: int) -> bool:
        """Return whether the prefill of `other` will extend the cached prefix of `state`.

        It must reach beyond `known` tokens, up to `max_shared`.
        """
        slots = state.group.slots
        if state.group.cache_factory.policy.sums_prompt:
            ends = [
                stop
                for stop in self._stops(other)
                if max(known, other.scheduled.num_computed_tokens) < stop <= max_shared
            ]
        else:
            end = known + self._tokens_of_unit(slots)
            ends = [end] if end <= min(max_shared, len(other.ids)) else []
        return (
            bool(ends)
            and other.group.slots == slots
            and bool((other.share_ids[: ends[0]] == state.share_ids[: ends[0]]).all())
            and self._shares(other)
            and self._same_key(state, other)
        )

    def add_common_breakpoints(self, state: RequestState, others: Iterable[RequestState]) -> None:
        """Add the breakpoints from which waiting prompts would continue, before a prompt begins."""
        if state.spans or not state.group.cache_factory.policy.sums_prompt or not self._shares(state):
            return
        ends = self._ends_in_common(state, others)
        if ends:
            state.stops = sorted({*state.stops, *ends})

    def _ends_in_common(self, state: RequestState, others: Iterable[RequestState]) -> list[int]:
        """Return ends of what a prompt shares with prompts that have not begun, in units."""
        waiting = (
            other.share_ids[: max(self._max_shared_tokens(other), 0)]
            for other in self._not_begun(others)
            if other is not state and self._same_key(state, other)
        )
        return common_ends(
            state.share_ids, list(islice(waiting, MAX_COMPARED)), self._tokens_of_unit(state.group.slots)
        )

    def _not_begun(self, states: Iterable[RequestState]) -> Iterator[RequestState]:
        """Return the requests that may begin with blocks later."""
        return (
            state
            for state in states
            if state.private_cache is None
            and not state.scheduled.num_computed_tokens
            and state.shared_prefix is None
            and not state.spans
            and self._shares(state)
        )

    def next_stop(self, state: RequestState) -> int:
        """Return the token of a prompt up to which a part of it may be read in one pass."""
        return next((stop for stop in self._stops(state) if stop > state.scheduled.num_computed_tokens), len(state.ids))

    def insert_blocks(self, state: RequestState) -> None:
        """Keep the full blocks of a prompt that is being read, so that others can begin with them."""
        if state.private_cache is None or not self._shares(state):
            return
        if state.group.cache_factory.policy.sums_prompt:
            if state.scheduled.num_computed_tokens in self._stops(state):
                self._insert_sums(state, state.private_cache)
        else:
            self._insert_path(state, state.private_cache, state.scheduled.num_computed_tokens)

    def _insert_path(self, state: RequestState, batch_cache: BatchCache, n_tokens: int) -> list[PrefixNode]:
        tables = [layer_cache.table for layer_cache in batch_cache.layers if layer_cache.table is not None]
        key, ids, coding = self._cache_key(state), state.share_ids[:n_tokens], None
        samples = batch_cache.samples
        if self.coded is not None and samples is not None and samples.has_seen(n_tokens) and can_code(tables):
            bases = [table.basis for table in tables]
            first = 0 if state.behind is None else state.begun_with
            coding = Coding(samples.exact, bases, first)
        return self.tree.keep(key, ids, tables, self._access(state), coding=coding, behind=state.behind)

    def _insert_sums(self, state: RequestState, batch_cache: BatchCache) -> None:
        """Keep a part of a prompt and its sums, if memory is free or blocks can be evicted."""
        kind, read = SumKind.of(state.group.cache_factory.policy), state.scheduled.num_computed_tokens
        assert kind is not None, "a policy with sums"
        path = self._own_path(state, read)
        if len(path) * state.group.slots == read and kind in path[-1].sums:
            self._insert_path(state, batch_cache, read)
            return
        before = self._before(path, kind) if kind.queries else None
        sums = PromptSums(read, batch_cache.sums(0 if before is None else before.length), before)
        if not self._room_for(sums.nbytes):
            return
        path = self._insert_path(state, batch_cache, read)
        if before is None or any(node.sums.get(kind) is before for node in path):  # it was not evicted for these
            self.tree.keep_sums(path[-1], kind, sums)

    @staticmethod
    def _before(path: list[PrefixNode], kind: SumKind) -> PromptSums | None:
        """Return the last sums on a path."""
        return next((node.sums[kind] for node in reversed(path) if kind in node.sums), None)

    def _room_for(self, n_bytes: int) -> bool:
        """Return whether sums fit, or do once about as many bytes of blocks were evicted."""
        requested: Pages = {self.tree.sum_memory: n_bytes}
        until = self.tree.evicted + MAX_EVICTED
        self.tree.evict(lambda: self._memory_limit.make_room(requested) or self.tree.evicted >= until)
        return self._memory_limit.can_take(requested)

    def insert(self, state: RequestState, later: Pages) -> None:
        """Keep the pages of a prompt that was read, before its plan.

        Where only requests in flight share, those are kept that stay its own, or that others wait for. Blocks are
        evicted where its plan, or `later` ones of the same step, would find too few pages: those that the
        rule chooses, then the last of its own.
        """
        batch_cache = state.private_cache
        if batch_cache is None or not self._enabled:
            return
        path: list[PrefixNode] = []
        if self._shares(state):
            if state.group.cache_factory.policy.sums_prompt:  # it was kept at its breakpoints
                path = self._own_path(state, len(state.ids))
            elif self._in_flight is None or keeps_pages(state.group.cache_factory):
                path = self._insert_path(state, batch_cache, len(state.ids))
            else:  # its plan leaves these pages
                n_wanted = max(self._ends_in_common(state, self._in_flight), default=0)
                if n_wanted:
                    self._insert_path(state, batch_cache, n_wanted)
                path = self._own_path(state, len(state.ids))
                self.tree.drop_end(path, n_wanted // state.group.slots, holders=2)

        if self._shares(state):
            self._codes.begin(self._cache_key(state), state.share_ids, state.group.cache_factory, batch_cache)

        def need() -> Pages:
            return sum_pages(self.plan_pages(state), later)

        if not self.make_room(need()):
            while self.tree.shorten(path) and not self._memory_limit.make_room(need()):
                pass

    def insert_codes(self, state: RequestState) -> None:
        """Let other requests hold the codes of a prompt, after its plan."""
        if state.private_cache is not None and self._shares(state):
            self._codes.keep(self._cache_key(state), state.share_ids, state.group.cache_factory, state.private_cache)

    @property
    def trees(self) -> tuple[PrefixTree, PrefixTree]:
        """Trees of plain pages and of pages of codes."""
        return self.tree, self._codes.tree

    def advance(self, step_s: float | None = None) -> None:
        """Code blocks that are due, and take codes that were made; called between two passes.

        Args:
            step_s: Seconds that the last step took; None: no request is in flight.
        """
        if self.coded is not None:
            self.coded.advance(step_s)

    @property
    def due_s(self) -> float | None:
        """Seconds until `advance` has something to do without requests; None: nothing."""
        return None if self.coded is None else self.coded.due_s

    def wait(self) -> None:
        """Wait for blocks that are decoded, for a moment."""
        if self.coded is not None:
            self.coded.wait()

    def close(self) -> None:
        """Stop coding."""
        if self.coded is not None:
            self.coded.close()

    def clear(self) -> None:
        """Drop all blocks."""
        for tree in self.trees:
            tree.clear()

    def release_unheld(self) -> None:
        """Drop the blocks that no request holds or waits for, if none are to be kept."""
        self._codes.release_unheld()
        if self._in_flight is None or not len(self.tree):
            return
        seen = self.tree.n_releases, len(self._in_flight)
        if seen == self._released:
            return
        waiting = islice(self._not_begun(self._in_flight), MAX_COMPARED)
        self.tree.release_unheld({node for state in waiting for node in self._match_prefix(state)})
        self._released = self.tree.n_releases, len(self._in_flight)

    def make_room(self, pages: Pages) -> bool:
        """Return whether these pages are free, after eviction of blocks that no request holds."""
        self._codes.release_unheld()
        return self.tree.evict(lambda: self._memory_limit.make_room(pages))

    def stats(self) -> PrefixStats | None:
        """Return the blocks held, found and evicted; None where no prompts are kept."""
        if self._rule is None or self._in_flight is not None:
            return None
        tree = self.tree
        figures = PrefixStats(
            self._rule.name, len(tree), self._hits, self._misses, tree.evicted, tree.sum_memory.nbytes
        )
        if self.coded is not None:
            figures = replace(figures, **self.coded.figures())
        if self._store is None:
            return figures
        return replace(
            figures,
            disk_blocks=tree.n_stored,
            disk_bytes=self._store.bytes_used,
            returned=tree.returned,
            lost=tree.lost,
        )

    def remove(self, state: RequestState) -> None:
        """Remove the blocks of a request that no other kept block follows."""
        if self._shares(state):
            path = self._own_path(state, len(state.ids))
            while self.tree.shorten(path):
                pass

    def plan_pages(self, state: RequestState) -> Pages:
        """Return the pages that the plan of a prompt takes besides those that it frees before."""
        if self._memory_limit.limit_bytes is None:
            return {}
        return plan_pages(state.group.cache_factory, len(state.ids), state.private_cache)

    def _access(self, state: RequestState) -> int:
        """Return the number of a prompt's one access to its blocks, however many parts it has."""
        if state.access is None:
            state.access = self.tree.new_request()
        return state.access

    def _match_prefix(self, state: RequestState) -> list[PrefixNode]:
        """Return the known blocks of a prompt, without the queries that its plan needs."""
        max_shared = self._max_shared_tokens(state)
        if not self._shares(state) or max_shared <= 0:
            return []
        return self._usable(state, self._find(state, max_shared, self.coded is not None))

    def _find(self, state: RequestState, n_tokens: int, behind: bool) -> list[PrefixNode]:
        """Return the blocks in memory with which a prompt begins.

        behind: whether those behind decoded ones may be among them.
        """
        return self.tree.find(self._cache_key(state), state.share_ids[:n_tokens], state.group.slots, behind=behind)

    def _own_path(self, state: RequestState, n_tokens: int) -> list[PrefixNode]:
        """Return the blocks in memory of what a prompt has read, of its kind."""
        return self._find(state, n_tokens, state.behind is not None)

    def _usable(self, state: RequestState, path: list[PrefixNode]) -> list[PrefixNode]:
        """Return the beginning of a path from which a prompt can continue.

        It has whole units, or ends at the last sums.
        """
        kind = SumKind.of(state.group.cache_factory.policy)
        if kind is None:
            return path[: self._whole_units(state, len(path))]
        return path[: next((n for n in range(len(path), 0, -1) if kind in path[n - 1].sums), 0)]

    def _tokens_of_unit(self, slots: int) -> int:
        """Return the least tokens that a prompt takes over: whole pages."""
        return max(self._unit, slots)

    def _stops(self, state: RequestState) -> list[int]:
        """Return the breakpoints of a prompt at which it may be cut."""
        return [stop for stop in state.stops if stop % self._unit == 0]

    def _whole_units(self, state: RequestState, blocks: int) -> int:
        return blocks - blocks % (self._tokens_of_unit(state.group.slots) // state.group.slots)

    def _with_stored(self, state: RequestState) -> tuple[list[PrefixNode], list[PrefixNode]]:
        """Return a prompt's first blocks in memory, and those on the disk after them.

        Requests that need sums go on up to the last of them on the disk, where they are with a storage codec alone.
        """
        max_shared, sums = self._max_shared_tokens(state), SumKind.of(state.group.cache_factory.policy)
        if not self.tree.n_stored or max_shared <= 0 or (sums is not None and self.coded is None):
            return [], []
        kind, shared_ids, slots = self._cache_key(state), state.share_ids[:max_shared], state.group.slots
        path = self._find(state, max_shared, self.coded is not None)
        stored = self.tree.find_stored(kind, shared_ids, slots, path)
        if sums is not None:
            stored = stored[: next((n for n in range(len(stored), 0, -1) if stored[n - 1].has_stored(sums)), 0)]
        return path, stored

    def _load_from_disk(self, state: RequestState) -> None:
        """Load blocks with which a prompt continues from the disk."""
        path, stored = self._with_stored(state)
        if stored:
            self.tree.load(path, stored, self.make_room, self._access(state))

    def _num_expected_blocks(self, state: RequestState) -> int:
        """Return the blocks that a prompt will begin with, those on the disk included."""
        path, stored = self._with_stored(state)
        return self._whole_units(state, len(path) + len(stored)) if stored else len(self._match_prefix(state))

    def _max_shared_tokens(self, state: RequestState) -> int:
        """Return the tokens that a prompt may take over: at least its last one is read for it."""
        return state.group.cache_factory.within_context(len(state.ids)) - max(
            1, state.group.cache_factory.policy.window
        )

    def _shares(self, state: RequestState) -> bool:
        exact = state.prompt_logprobs is None and not state.tainted and not state.rolled
        return self._enabled and exact and can_share(state.group.cache_factory)

    def _same_key(self, state: RequestState, other: RequestState) -> bool:
        """Return whether the pages of one prompt can be taken over for another."""
        sums = (SumKind.of(each.group.cache_factory.policy) for each in (state, other))
        return next(sums) == next(sums) and self._cache_key(state) == self._cache_key(other)

    def _cache_key(self, state: RequestState) -> Hashable:
        """Return a key of pages that hold the same before a plan, of requests with the same salt.

        Sums do not count.
        """
        cache_factory, salt = state.group.cache_factory, state.request.cache_salt
        hashed = None
        if salt is not None:
            hashed = hashlib.blake2b(salt.encode("utf-8", "surrogatepass"), key=self._secret, digest_size=16).digest()
        policy = cache_factory.policy
        scorer = policy.entry_scores or policy.hidden_networks
        scores = policy.sums_prompt, None if scorer is None else scorer.digest
        return cache_factory.pools.format, policy.mass_bias, scores, hashed
