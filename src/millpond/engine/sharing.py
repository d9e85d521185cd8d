"""Sharing: prompts that begin alike read what they have in common once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import Any

from millpond.cache.account import Account
from millpond.cache.counted import CountedPages
from millpond.cache.prefix import PrefixTree, tables_of
from millpond.cache.stack import Pages, Stack
from millpond.engine.live import Live
from millpond.hf.recipe import Recipe
from millpond.policy.nested import NestedPolicy


class Sharing:
    """Which prompts share pages, and when.

    What is shared are the pages of a prompt before anything was planned; the plan of each request makes its own
    copies. So methods share whose plan can be made of entries and of the queries of the prompt's end.

    Args:
        enabled: whether anything is shared at all.
    """

    def __init__(self, account: Account, *, enabled: bool) -> None:
        self.tree = PrefixTree()
        self._account = account
        self._enabled = enabled

    def begin(self, live: Live) -> int:
        """Let a request that begins hold the pages that are known of its prompt; returns how many tokens that are."""
        most = len(live.ids) - max(1, live.group.recipe.policy.window)
        if not self._shares(live) or most <= 0:
            return 0
        path = self.tree.find(_kind(live.group.recipe), live.numbers[:most], live.group.slots)
        if path:
            live.stack = live.group.recipe.stack(len(live.ids))
            live.stack.begin_with(tables_of(path))
        return len(path) * live.group.slots

    def keep(self, live: Live) -> None:
        """Keep the pages of a prompt that was read, before its plan, where there is room for what it then writes."""
        stack = live.stack
        if stack is not None and self._shares(live) and self._account.can_take(_again(stack)):
            tables = [core.table for core in stack.cores if core.table is not None]
            self.tree.keep(_kind(live.group.recipe), live.numbers, tables)

    def _shares(self, live: Live) -> bool:
        return self._enabled and live.prompt_logprobs is None and can_share(live.group.recipe)


def can_share(recipe: Recipe) -> bool:
    """Whether a plan needs nothing of a prompt's beginning but its keys and values."""
    policy = recipe.policy
    sums = policy.observes_all or policy.sums_queries or isinstance(policy, NestedPolicy)
    moves = policy.prefill == "greedy" or policy.positions != "absolute"
    codec = recipe.pools.codec
    observes = codec is not None and (codec.balanced or codec.prune > 0)
    return not (sums or moves or observes or recipe.whole_prompt)


def _kind(recipe: Recipe) -> Hashable:
    """Recipes whose pages hold the same before a plan."""
    return recipe.pools.format, recipe.policy.mass_bias


def _again(stack: Stack) -> Pages:
    """As many pages as the stack holds."""
    need: Counter[CountedPages[Any]] = Counter()
    for core in stack.cores:
        if core.table is not None:
            need[core.table.pool] += len(core.table.held())
    return dict(need)
