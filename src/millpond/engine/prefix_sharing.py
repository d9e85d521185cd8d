"""Prefix sharing: the common beginning of prompts is read once."""

from __future__ import annotations

import hashlib
import secrets
from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import replace

from millpond.cache.batch_cache import Pages
from millpond.cache.pages.memory_limit import MemoryLimit
from millpond.cache.pages.pool_protocol import Pool
from millpond.cache.paging.rule import PagingRule
from millpond.cache.prefix_tree import PrefixNode, PrefixTree, tables_of
from millpond.cache.tiered.block_store import BlockStore
from millpond.engine.memory_estimate import pages_to_settle
from millpond.engine.outputs import PrefixStats
from millpond.engine.request_state import RequestState
from millpond.runner.cache_factory import CacheFactory
from millpond.runner.packed_model import LayerShape


class PrefixSharing:
    """Which prompts share pages, and when.

    What is shared are the pages of a prompt before anything was planned; the plan of each request makes its own
    copies. So methods share whose plan can be made of entries and of the queries of the prompt's end.

    Args:
        layers: what each layer of the model stores. rule: which blocks go first; None: nothing is shared at all.
        store: of the blocks that leave the memory; None: they are forgotten.
    """

    def __init__(
        self,
        account: MemoryLimit,
        layers: list[LayerShape],
        rule: PagingRule | None,
        store: BlockStore | None = None,
    ) -> None:
        self.tree = PrefixTree(rule, store)
        self._store = store
        self._rule = rule
        self._hits = self._misses = 0
        self._account = account
        self._layers = layers
        self._enabled = rule is not None
        self._secret = secrets.token_bytes(32)

    def begin(self, live: RequestState) -> int:
        """Let a request that begins hold the pages that are known of its prompt; returns how many tokens that are."""
        if not self._shares(live):
            return 0
        path = self._known(live)
        if self.tree.n_stored:
            path = self.tree.bring_back(path, self._stored(live, path), self.has, self._access(live))
        self._hits += len(path)
        self._misses += len(live.ids) // live.group.slots - len(path)
        if path:
            live.stack = live.group.recipe.stack(len(live.ids))
            live.stack.begin_with(tables_of(path))
        return len(path) * live.group.slots

    def waits(self, live: RequestState, reading: Iterable[RequestState]) -> bool:
        """Whether the block behind what is known of a prompt that begins is being read for another one."""
        if not self._shares(live):
            return False
        slots, kind = live.group.slots, self._kind(live)
        known = self._known(live)
        end = (len(known) + len(self._stored(live, known)) + 1) * slots
        if end > self._most(live):
            return False
        return any(
            other.group.slots == slots
            and len(other.ids) >= end
            and bool((other.numbers[:end] == live.numbers[:end]).all())
            and self._shares(other)
            and self._kind(other) == kind
            for other in reading
        )

    def keep_blocks(self, live: RequestState) -> None:
        """Keep the full blocks of a prompt that is still being read, so that others can begin with them."""
        if live.stack is not None and self._shares(live):
            tables = [core.table for core in live.stack.layers if core.table is not None]
            self.tree.keep(self._kind(live), live.numbers[: live.job.read], tables, self._access(live))

    def keep(self, live: RequestState, later: Pages) -> None:
        """Keep the pages of a prompt that was read, before its plan.

        Blocks are evicted where its plan, or `later` ones of the same step, would find no room: those that the rule
        chooses, then the last of its own.
        """
        stack = live.stack
        if stack is None or not self._enabled:
            return
        path: list[PrefixNode] = []
        if self._shares(live):
            tables = [core.table for core in stack.layers if core.table is not None]
            path = self.tree.keep(self._kind(live), live.numbers, tables, self._access(live))

        def need() -> Pages:
            return together(self.pages_to_settle(live), later)

        if not self.has(need()):
            while self.tree.shorten(path) and not self._account.can_take(need()):
                pass

    def has(self, pages: Pages) -> bool:
        """Whether there is room for these pages, or will be without blocks that no request holds."""
        return self.tree.evict(lambda: self._account.can_take(pages))

    def stats(self) -> PrefixStats | None:
        """Blocks held, found and evicted; None where nothing is shared."""
        if self._rule is None:
            return None
        tree = self.tree
        figures = PrefixStats(self._rule.name, len(tree), self._hits, self._misses, tree.evicted)
        if self._store is None:
            return figures
        return replace(
            figures, disk_blocks=tree.n_stored, disk_bytes=self._store.bytes_used, returned=tree.returned,
            lost=tree.lost,
        )  # fmt: skip

    def let_go(self, live: RequestState) -> None:
        """No longer keep what a request has read, as far as nothing else that is kept follows it."""
        if self._shares(live):
            path = self.tree.find(self._kind(live), live.numbers, live.group.slots)
            while self.tree.shorten(path):
                pass

    def pages_to_settle(self, live: RequestState) -> Pages:
        """Pages that the plan of a request's prompt takes in addition to those that it frees before."""
        if self._account.limit_bytes is None:
            return {}
        return pages_to_settle(live.group.recipe, self._layers, len(live.ids), live.stack)

    def _access(self, live: RequestState) -> int:
        """The number of a prompt's one access to its blocks, in however many parts they are kept."""
        if live.access is None:
            live.access = self.tree.new_request()
        return live.access

    def _known(self, live: RequestState) -> list[PrefixNode]:
        """The blocks that are known of a prompt, without the queries that its plan needs."""
        most = self._most(live)
        if not self._shares(live) or most <= 0:
            return []
        return self.tree.find(self._kind(live), live.numbers[:most], live.group.slots)

    def _stored(self, live: RequestState, known: list[PrefixNode]) -> list[PrefixNode]:
        """The blocks on the disk behind those that are `known` of a prompt."""
        most = self._most(live)
        if not self.tree.n_stored or most <= 0:
            return []
        return self.tree.find_stored(self._kind(live), live.numbers[:most], live.group.slots, known)

    def _most(self, live: RequestState) -> int:
        """Tokens that a prompt may take over: at least its last one is read for it."""
        return len(live.ids) - max(1, live.group.recipe.policy.window)

    def _shares(self, live: RequestState) -> bool:
        exact = live.prompt_logprobs is None and not live.tainted
        return self._enabled and exact and can_share(live.group.recipe)

    def _kind(self, live: RequestState) -> Hashable:
        """Equal where pages hold the same before a plan and requests have the same salt."""
        recipe, salt = live.group.recipe, live.request.cache_salt
        hashed = None
        if salt is not None:
            hashed = hashlib.blake2b(salt.encode("utf-8", "surrogatepass"), key=self._secret, digest_size=16).digest()
        scorer = recipe.policy.entry_scores
        return recipe.pools.format, recipe.policy.mass_bias, None if scorer is None else scorer.digest, hashed


def can_share(recipe: CacheFactory) -> bool:
    """Whether a plan needs nothing of a prompt's beginning but its keys and values."""
    policy = recipe.policy
    sums = policy.observes_all or policy.sums_queries or policy.needs.head_rules is not None
    moves = policy.prefill != "once" or policy.positions != "absolute"
    observes = any(codec.balanced or codec.prune > 0 for codec in recipe.pools.codecs)
    if recipe.slots is not None or policy.gates is not None:  # the states at the end of what is shared are not kept
        return False
    return not (sums or moves or observes or recipe.whole_prompt)


def together(*parts: Pages) -> Pages:
    """All these pages."""
    need: Counter[Pool] = Counter()
    for pages in parts:
        need.update(pages)
    return dict(need)
