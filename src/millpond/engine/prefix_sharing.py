"""Prefix sharing: the common beginning of prompts is read once."""

from __future__ import annotations

import hashlib
import secrets
from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import replace
from itertools import islice

import torch

from millpond.cache.batch_cache import BatchCache, Pages
from millpond.cache.pages.memory_limit import MemoryLimit, SumMemory
from millpond.cache.pages.ref_counted_pool import Pool
from millpond.cache.paging.rule import PagingRule
from millpond.cache.prefix_tree import PrefixNode, PrefixTree, tables_of
from millpond.cache.state.prompt_sums import PromptSums, SumKind
from millpond.cache.tiered.block_store import BlockStore
from millpond.engine.memory_estimate import pages_to_settle
from millpond.engine.outputs import PrefixStats
from millpond.engine.prompt_marks import MOST_COMPARED, common_ends
from millpond.engine.request_state import RequestState
from millpond.runner.cache_factory import CacheFactory
from millpond.runner.packed_model import LayerShape

#: Blocks that are evicted at most to keep the sums of one breakpoint: pages of other blocks may hold their memory back.
MOST_EVICTED = 64


class PrefixSharing:
    """Which prompts share pages, and when.

    What is shared are the pages of a prompt before anything was planned; the plan of each request makes its own
    copies. Methods whose plan can be made of entries and of the queries of the prompt's end share every block. Those
    that sum over all queries share up to the breakpoints of prompts, where their sums are kept with the block.

    Args:
        layers: what each layer of the model stores. rule: which blocks go first; None: nothing is shared at all.
        unit: prompts take over multiples of as many tokens; a multiple of the entries of a page, or 1.
        store: of the blocks that leave the memory; None: they are forgotten.
    """

    def __init__(
        self,
        account: MemoryLimit,
        layers: list[LayerShape],
        rule: PagingRule | None,
        unit: int = 1,
        store: BlockStore | None = None,
    ) -> None:
        self.tree = PrefixTree(rule, None if rule is None else SumMemory(account), store)
        self._store = store
        self._rule = rule
        self._hits = self._misses = 0
        self._account = account
        self._layers = layers
        self._enabled = rule is not None
        self._unit = unit
        self._secret = secrets.token_bytes(32)

    def attach(self, live: RequestState) -> int:
        """See `PromptSource`: a request that begins holds the pages that are known of its prompt."""
        if not self._shares(live):
            return 0
        self._bring_back(live)
        path = self._known(live)
        self._hits += len(path)
        self._misses += len(live.ids) // live.group.slots - len(path)
        if path:
            live.stack = live.group.recipe.stack(len(live.ids))
            sums = SumKind.of(live.group.recipe.policy)
            live.stack.begin_with(
                tables_of(path),
                torch.from_numpy(live.numbers).to(path[0].pools[0].arrays.device),
                None if sums is None else path[-1].sums[sums].whole(),
            )
        return len(path) * live.group.slots

    def known_tokens(self, live: RequestState) -> int:
        """Tokens at the beginning of a prompt whose pages are known."""
        return len(self._known(live)) * live.group.slots if self._enabled else 0

    def reader(self, live: RequestState, reading: Iterable[RequestState]) -> RequestState | None:
        """The request for which is being read what comes behind what is known of a prompt that begins; None: none."""
        if not self._shares(live):
            return None
        known, most = self._coming(live) * live.group.slots, self._most(live)
        return next((other for other in reading if self._will_help(live, other, known, most)), None)

    def _will_help(self, live: RequestState, other: RequestState, known: int, most: int) -> bool:
        """Whether the part that is read of another prompt brings more than `known` tokens, at most `most`, of one."""
        slots = live.group.slots
        if live.group.recipe.policy.sums_prompt:
            ends = [stop for stop in self._stops(other) if max(known, other.job.read) < stop <= most]
        else:
            end = known + self._tokens_of_unit(slots)
            ends = [end] if end <= min(most, len(other.ids)) else []
        return (
            bool(ends)
            and other.group.slots == slots
            and bool((other.numbers[: ends[0]] == live.numbers[: ends[0]]).all())
            and self._shares(other)
            and self._alike(live, other)
        )

    def meet(self, live: RequestState, others: Iterable[RequestState]) -> None:
        """Before a prompt begins: let it stop where others that have not begun would go on from it."""
        if live.spans or not live.group.recipe.policy.sums_prompt or not self._shares(live):
            return
        waiting = (
            other.numbers[: max(self._most(other), 0)]
            for other in others
            if other is not live
            and other.stack is None
            and not other.job.read
            and other.trunk is None
            and not other.spans
            and self._shares(other)
            and self._alike(live, other)
        )
        alike = list(islice(waiting, MOST_COMPARED))
        if alike:
            unit = self._tokens_of_unit(live.group.slots)
            live.stops = sorted({*live.stops, *common_ends(live.numbers, alike, unit)})

    def next_stop(self, live: RequestState) -> int:
        """Tokens of a prompt up to which a part of it may be read in one pass."""
        return next((stop for stop in self._stops(live) if stop > live.job.read), len(live.ids))

    def keep_blocks(self, live: RequestState) -> None:
        """Keep the full blocks of a prompt that is still being read, so that others can begin with them."""
        if live.stack is None or not self._shares(live):
            return
        if live.group.recipe.policy.sums_prompt:
            if live.job.read in self._stops(live):
                self._keep_sums(live, live.stack)
        else:
            self._keep(live, live.stack, live.job.read)

    def _keep(self, live: RequestState, stack: BatchCache, n_tokens: int) -> list[PrefixNode]:
        tables = [layer_cache.table for layer_cache in stack.layers if layer_cache.table is not None]
        return self.tree.keep(self._kind(live), live.numbers[:n_tokens], tables, self._access(live))

    def _keep_sums(self, live: RequestState, stack: BatchCache) -> None:
        """Keep what was read of a prompt and its sums, if there is room or blocks can be evicted for them."""
        kind, read = SumKind.of(live.group.recipe.policy), live.job.read
        assert kind is not None, "a policy with sums"
        path = self.tree.find(self._kind(live), live.numbers[:read], live.group.slots)
        if len(path) * live.group.slots == read and kind in path[-1].sums:
            self._keep(live, stack, read)
            return
        before = self._before(path, kind) if kind.queries else None
        sums = PromptSums(read, stack.sums(0 if before is None else before.length), before)
        if not self._room_for(sums.nbytes):
            return
        path = self._keep(live, stack, read)
        if before is None or any(node.sums.get(kind) is before for node in path):  # it was not evicted for these
            self.tree.keep_sums(path[-1], kind, sums)

    @staticmethod
    def _before(path: list[PrefixNode], kind: SumKind) -> PromptSums | None:
        """The last sums on a path."""
        return next((node.sums[kind] for node in reversed(path) if kind in node.sums), None)

    def _room_for(self, n_bytes: int) -> bool:
        """Whether sums fit, or do once about as many bytes of blocks were evicted."""
        wanted: Pages = {self.tree.sum_memory: n_bytes}
        until = self.tree.evicted + MOST_EVICTED
        self.tree.evict(lambda: self._account.make_room(wanted) or self.tree.evicted >= until)
        return self._account.can_take(wanted)

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
            if live.group.recipe.policy.sums_prompt:  # it was kept at its breakpoints
                path = self.tree.find(self._kind(live), live.numbers, live.group.slots)
            else:
                path = self._keep(live, stack, len(live.ids))

        def need() -> Pages:
            return together(self.pages_to_settle(live), later)

        if not self.has(need()):
            while self.tree.shorten(path) and not self._account.make_room(need()):
                pass

    def has(self, pages: Pages) -> bool:
        """Whether there is room for these pages, or will be without blocks that no request holds."""
        return self.tree.evict(lambda: self._account.make_room(pages))

    def stats(self) -> PrefixStats | None:
        """Blocks held, found and evicted; None where nothing is shared."""
        if self._rule is None:
            return None
        tree = self.tree
        figures = PrefixStats(
            self._rule.name, len(tree), self._hits, self._misses, tree.evicted, tree.sum_memory.nbytes
        )
        if self._store is None:
            return figures
        return replace(
            figures,
            disk_blocks=tree.n_stored,
            disk_bytes=self._store.bytes_used,
            returned=tree.returned,
            lost=tree.lost,
        )

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
        path = self.tree.find(self._kind(live), live.numbers[:most], live.group.slots)
        kind = SumKind.of(live.group.recipe.policy)
        if kind is None:
            return path[: self._whole_units(live, len(path))]
        return path[: next((n for n in range(len(path), 0, -1) if kind in path[n - 1].sums), 0)]

    def _tokens_of_unit(self, slots: int) -> int:
        """The least tokens that a prompt takes over: whole pages."""
        return max(self._unit, slots)

    def _stops(self, live: RequestState) -> list[int]:
        """The breakpoints of a prompt at which it may be cut."""
        return [stop for stop in live.stops if stop % self._unit == 0]

    def _whole_units(self, live: RequestState, blocks: int) -> int:
        return blocks - blocks % (self._tokens_of_unit(live.group.slots) // live.group.slots)

    def _with_stored(self, live: RequestState) -> tuple[list[PrefixNode], list[PrefixNode]]:
        """The blocks in memory with which a prompt begins, and those on the disk behind them; they lie there without
        sums, so that those who need sums find nothing."""
        most = self._most(live)
        if not self.tree.n_stored or most <= 0 or SumKind.of(live.group.recipe.policy) is not None:
            return [], []
        kind, numbers, slots = self._kind(live), live.numbers[:most], live.group.slots
        path = self.tree.find(kind, numbers, slots)
        return path, self.tree.find_stored(kind, numbers, slots, path)

    def _bring_back(self, live: RequestState) -> None:
        """Put blocks of the disk into memory with which a prompt goes on."""
        path, stored = self._with_stored(live)
        if stored:
            self.tree.load(path, stored, self.has, self._access(live))

    def _coming(self, live: RequestState) -> int:
        """Blocks that a prompt will begin with: known ones, with those that come back from the disk."""
        path, stored = self._with_stored(live)
        return self._whole_units(live, len(path) + len(stored)) if stored else len(self._known(live))

    def _most(self, live: RequestState) -> int:
        """Tokens that a prompt may take over: at least its last one is read for it."""
        return live.group.recipe.within_context(len(live.ids)) - max(1, live.group.recipe.policy.window)

    def _shares(self, live: RequestState) -> bool:
        exact = live.prompt_logprobs is None and not live.tainted and not live.rolled
        return self._enabled and exact and can_share(live.group.recipe)

    def _alike(self, live: RequestState, other: RequestState) -> bool:
        """Whether what was read of one prompt can be taken over for another."""
        sums = (SumKind.of(one.group.recipe.policy) for one in (live, other))
        return next(sums) == next(sums) and self._kind(live) == self._kind(other)

    def _kind(self, live: RequestState) -> Hashable:
        """Equal where pages hold the same before a plan, but for sums, and requests have the same salt."""
        recipe, salt = live.group.recipe, live.request.cache_salt
        hashed = None
        if salt is not None:
            hashed = hashlib.blake2b(salt.encode("utf-8", "surrogatepass"), key=self._secret, digest_size=16).digest()
        policy = recipe.policy
        scorer = policy.entry_scores
        scores = policy.sums_prompt, None if scorer is None else scorer.digest
        return recipe.pools.format, policy.mass_bias, scores, hashed


def can_share(recipe: CacheFactory) -> bool:
    """Whether a plan needs nothing of a prompt's beginning but its keys and values, and sums over its queries."""
    policy = recipe.policy
    moves = policy.prefill != "once" or policy.positions != "absolute"
    observes = any(codec.balanced or codec.prune > 0 for codec in recipe.pools.codecs)
    if recipe.slots is not None or policy.gates is not None:  # the states at the end of what is shared are not kept
        return False
    if policy.sums_prompt and policy.scores_entries:  # both are kept in one place
        return False
    return not (moves or observes or recipe.whole_prompt)


def together(*parts: Pages) -> Pages:
    """All these pages."""
    need: Counter[Pool] = Counter()
    for pages in parts:
        need.update(pages)
    return dict(need)
