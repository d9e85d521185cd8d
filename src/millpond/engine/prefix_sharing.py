"""Prefix sharing: the common beginning of prompts is read once."""

from __future__ import annotations

import hashlib
import secrets
from collections import Counter
from collections.abc import Hashable

from millpond.cache.batch_cache import Pages
from millpond.cache.pages.memory_limit import MemoryLimit
from millpond.cache.pages.pool_protocol import Pool
from millpond.cache.prefix_tree import PrefixNode, PrefixTree, tables_of
from millpond.engine.memory_estimate import pages_to_settle
from millpond.engine.request_state import RequestState
from millpond.runner.cache_factory import CacheFactory
from millpond.runner.packed_model import LayerShape


class PrefixSharing:
    """Which prompts share pages, and when.

    What is shared are the pages of a prompt before anything was planned; the plan of each request makes its own
    copies. So methods share whose plan can be made of entries and of the queries of the prompt's end.

    Args:
        layers: what each layer of the model stores. enabled: whether anything is shared at all.
    """

    def __init__(self, account: MemoryLimit, layers: list[LayerShape], *, enabled: bool) -> None:
        self.tree = PrefixTree()
        self._account = account
        self._layers = layers
        self._enabled = enabled
        self._secret = secrets.token_bytes(32)

    def begin(self, live: RequestState) -> int:
        """Let a request that begins hold the pages that are known of its prompt; returns how many tokens that are."""
        most = len(live.ids) - max(1, live.group.recipe.policy.window)
        if not self._shares(live) or most <= 0:
            return 0
        path = self.tree.find(self._kind(live), live.numbers[:most], live.group.slots)
        if path:
            live.stack = live.group.recipe.stack(len(live.ids))
            live.stack.begin_with(tables_of(path))
        return len(path) * live.group.slots

    def keep(self, live: RequestState, later: Pages) -> None:
        """Keep the pages of a prompt that was read, before its plan.

        The longest unused blocks go where its plan, or `later` ones of the same step, would find no room: older ones
        first, then the last of its own.
        """
        stack = live.stack
        if stack is None or not self._enabled:
            return
        path: list[PrefixNode] = []
        if self._shares(live):
            tables = [core.table for core in stack.layers if core.table is not None]
            path = self.tree.keep(self._kind(live), live.numbers, tables)

        def need() -> Pages:
            return together(self.pages_to_settle(live), later)

        if not self.has(need()):
            while self.tree.shorten(path) and not self._account.can_take(need()):
                pass

    def has(self, pages: Pages) -> bool:
        """Whether there is room for these pages, or will be without blocks that no request holds."""
        return self.tree.evict(lambda: self._account.can_take(pages))

    def let_go(self, live: RequestState) -> None:
        """No longer keep what a request has read, as far as nothing else that is kept follows it."""
        if live.answers[0].shared:
            path = self.tree.find(self._kind(live), live.numbers, live.group.slots)
            while self.tree.shorten(path):
                pass

    def pages_to_settle(self, live: RequestState) -> Pages:
        """Pages that the plan of a request's prompt takes in addition to those that it frees before."""
        if self._account.limit_bytes is None:
            return {}
        return pages_to_settle(live.group.recipe, self._layers, len(live.ids), live.stack)

    def _shares(self, live: RequestState) -> bool:
        return self._enabled and live.prompt_logprobs is None and can_share(live.group.recipe)

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
    codec = recipe.pools.codec
    observes = codec is not None and (codec.balanced or codec.prune > 0)
    if recipe.slots is not None or policy.gates is not None:  # the states at the end of what is shared are not kept
        return False
    return not (sums or moves or observes or recipe.whole_prompt)


def together(*parts: Pages) -> Pages:
    """All these pages."""
    need: Counter[Pool] = Counter()
    for pages in parts:
        need.update(pages)
    return dict(need)
