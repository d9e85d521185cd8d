"""Entries per KV head of one layer and sequence, from the budget of the whole cache."""

from __future__ import annotations

import bisect
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from millpond.budget import DEFAULT, Budget
from millpond.cache.layer.layer_cache import LayerCache
from millpond.cache.pages.page_table import PageTable
from millpond.cache.pages.quantized_store import QuantizedStore
from millpond.cache.state.positions import PositionTracker
from millpond.errors import BudgetError, OptionError
from millpond.kernels.decode_rules import UNBOUNDED
from millpond.policy.head_allocation import PromptHeadAllocation
from millpond.policy.layer_allocation import LayerAllocation, PromptLayers, split_budget
from millpond.policy.policy import Policy
from millpond.policy.protect import kept_beyond_budget
from millpond.policy.scores.attention import Recency
from millpond.policy.view import View


class BudgetFloorWarning(UserWarning):
    """Warning: a ratio of a short prompt is below what the method protects and keeps."""


class FewEntriesWarning(UserWarning):
    """Warning: so few entries stay that answers suffer, or all of them whatever the score is."""


#: Entries per KV head below which a budget that evicts is warned of. A choice: a chat of a real model answered another
#: question with 8 of them, and as with the full cache with 256.
FEW_ENTRIES = 64


class LayerBudgets:
    """Division of one budget among the layers of a model.

    Args:
        budget: Budget of the whole cache; None for no limit.
        policy: Policy of the cache.
        windows: Positions that a query of each layer sees, its own among them; 0 for all.

    Attributes:
        budget: Budget of the whole cache; None for no limit.
        layer_caches: Caches of the layers, set when they are made; an allocation that depends on the prompt measures
            them.
        at_prompt_end: Function `at_prompt_end(sequence, seen)` that returns the tokens of the text when the prompt that
            is being read ends.
    """

    def __init__(self, budget: Budget | None, policy: Policy, windows: Sequence[int]) -> None:
        policy.layers.check(len(windows))
        if isinstance(policy.heads, PromptHeadAllocation):
            policy.heads.check(len(windows))
        self.budget = budget
        self._policy = policy
        self._windows = windows
        self._warned: set[type[Warning]] = set()
        self._decided: dict[int, LayerAllocation] = {}
        self.layer_caches: list[LayerCache] = []
        self.at_prompt_end: Callable[[int, int], int] = lambda sequence, seen: seen

    def entries(self, layer: int, table: PageTable, sequence: int, seen: int, kept: int = 0) -> int:
        """Return the entries per KV head that `layer` may keep of a sequence of `seen` tokens.

        Args:
            layer: Index of the layer.
            table: Table of the layer.
            sequence: Sequence in the table.
            seen: Tokens of the sequence.
            kept: Tokens, sinks left out, that every layer keeps whatever the method is; layers share the rest.

        Raises:
            BudgetError: kept tokens leave less than the method protects.
        """
        if self.budget is None:
            return UNBOUNDED
        seen = self.at_prompt_end(sequence, seen)
        layers, average = self._policy.layers, self._average(table, seen, kept)
        if isinstance(layers, PromptLayers):
            layers = self._decide(layers, layer, sequence, average - kept)
        max_entries = [min(seen, max(window - 1, 1) if window else seen) for window in self._windows]
        min_entries = self._policy.protect.minimum()
        max_entries = [max(entries - kept, min_entries) for entries in max_entries] if kept else max_entries
        return split_budget(layers, average - kept, min_entries, max_entries)[layer] + kept

    def _decide(self, layers: PromptLayers, layer: int, sequence: int, average: int) -> LayerAllocation:
        """Return the allocation that the first layer decides when it plans; the others follow.

        Args:
            layers: Allocation of the policy.
            layer: Index of the layer.
            sequence: Sequence in the batch.
            average: Entries per KV head on average over the layers, which scores may depend on.

        Raises:
            OptionError: the first layer plans before the others have read the prompt.
        """
        if layer == 0:
            if any(layer_cache.columns != self.layer_caches[0].columns for layer_cache in self.layer_caches):
                raise OptionError(
                    "layer budgets that depend on the prompt are known when all layers have read it, which assisted "
                    "generation does not wait for; give across=false if the method has it, or use another one"
                )

            def measure(view: View) -> Any:
                return layers.measure(replace(view, budget=average))

            self._decided[sequence] = layers.decide(
                [layer_cache.measure(sequence, measure) for layer_cache in self.layer_caches]
            )
        return self._decided[sequence]

    def _average(self, table: PageTable, seen: int, kept: int = 0) -> int:
        """Return the entries per KV head on average over the layers."""
        assert self.budget is not None
        entries = self._requested_entries(table, seen, floor=not kept)
        min_entries = self._policy.protect.minimum()
        if kept and entries - kept < min_entries:
            raise BudgetError(f"budget {self.budget}: {kept_beyond_budget(kept, min_entries, entries)}")
        self._warn_of_few(entries - kept, seen - kept)
        return entries

    def _requested_entries(self, table: PageTable, seen: int, floor: bool = True) -> int:
        """Return the budget of a sequence of `seen` tokens in entries per KV head.

        With `floor` a share is at least what is protected.
        """
        assert self.budget is not None
        if self.budget.kind == "bytes":
            entries = self._entries_of_bytes(table, int(self.budget.amount), seen)
            if entries < 1:
                raise BudgetError(
                    f"a budget of {self.budget} holds no entry of each of {len(self._windows) * table.n_regions} "
                    f"heads (layers x sequences x KV heads) besides what gathers before it is evicted or stored as "
                    "codes; raise the budget, or lower page_slots or what the method gathers"
                )
            return entries
        entries = self.budget.entries(seen)
        min_entries = self._policy.protect.minimum()
        if floor and self.budget.kind == "ratio" and entries < min_entries:
            self._warn(
                BudgetFloorWarning,
                f"{self.budget} of a prompt of {seen} tokens is {entries} entries, fewer than the {min_entries} that "
                f"the method protects; keeping {min_entries}",
            )
            return min_entries
        return entries

    def _warn_of_few(self, entries: int, seen: int) -> None:
        """Warn if `entries` per KV head of `seen` tokens are too few for answers or for the score."""
        protect = self._policy.protect
        protected = protect.sinks + protect.newest(entries)
        if entries >= seen:
            return
        if self._policy.score is not None and not isinstance(self._policy.score, Recency) and protected >= entries:
            self._warn(
                FewEntriesWarning,
                f"of {entries} entries per KV head {protect.sinks} are sinks and the rest the newest, so that the "
                "method's score chooses none; raise the budget, or lower sinks or recent",
            )
        elif entries < FEW_ENTRIES:
            self._warn(
                FewEntriesWarning,
                f"budget {self.budget}: of {seen} tokens {entries} entries per KV head stay, so few that answers of "
                f"most models suffer; raise the budget, or leave it out for {DEFAULT}",
            )

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Warn of nothing inside: budgets are only computed, for no text."""
        warned, self._warned = self._warned, {BudgetFloorWarning, FewEntriesWarning}
        try:
            yield
        finally:
            self._warned = warned

    def _warn(self, kind: type[Warning], text: str) -> None:
        """Warn once of each kind."""
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(text, kind, stacklevel=2)

    def _entries_of_bytes(self, table: PageTable, amount: int, seen: int) -> int:
        regions = len(self._windows) * table.n_regions
        page = table.pool.page_bytes + 4
        pages = (amount // regions - 12) // page
        if pages < 1:
            raise BudgetError(
                f"a budget of {amount} bytes leaves {amount // regions} bytes to each of {regions} heads (layers x "
                f"sequences x KV heads), less than one page of {page} bytes; raise the budget or lower page_slots"
            )
        slots = table.pool.slots
        # heads of different lengths each leave part of a page empty: together at most slots - 1 entries a head
        gathering = self._policy.plan_every - 1  # beyond the budget, before they are merged
        plain = int(pages) * slots - (0 if self._policy.heads_alike else slots - 1) - gathering
        if table.quantized is None:
            return plain
        if table.quantized.codec.tiered:
            return self._entries_above(table, amount, seen)
        if table.quantized.codec.ages:
            return max(min(plain, table.packed_parts[0].slots - 1), self._entries_by_age(table, amount))
        (quantized,) = table.packed_parts
        if not self._policy.heads_alike:
            return max(self._uneven_with_codes(table, quantized, amount))
        never_quantized = min(plain, _max_plain(quantized) - 1)
        return max(never_quantized, self._entries_with_codes(table, quantized, amount))

    def _entries_above(self, table: PageTable, amount: int, seen: int) -> int:
        """Return entries per KV head of the upper tier if all others are below it.

        They are a mean over the heads, of `seen` tokens. Besides them a page of entries gathers before it is demoted,
        and the last page of each tier may be empty.

        Raises:
            BudgetError: the lower tier leaves less than the method protects.
        """
        assert table.quantized is not None, "tiers are quantized"
        *uppers, quantized = table.packed_parts
        plain_page, packed_page = table.pool.page_bytes + 4, quantized.pool.page_bytes + 4
        tables = 20 + (4 * quantized.head_dim if quantized.codec.balanced else 0)
        entry_bytes = plain_page / table.pool.slots
        for upper in uppers:
            entry_bytes = (upper.pool.page_bytes + 4) / upper.slots
            tables += 8 + 2 * (upper.pool.page_bytes + 4)
        gathering = (quantized.slots / table.pool.slots + 1) * plain_page
        below = (seen / quantized.slots + 2) * packed_page
        free_bytes = amount // (len(self._windows) * table.n_regions) - tables - gathering - below
        entries = int(free_bytes // (entry_bytes - packed_page / quantized.slots))
        least = max(self._policy.protect.minimum(), 1)
        if entries < least:
            raise BudgetError(
                f"budget {self.budget}: codec {table.quantized.codec.name!r} stores all of {seen} tokens, and their "
                f"lower tier leaves room for {max(entries, 0)} entries per KV head of the upper one, fewer than the "
                f"{least} that stay there; raise the budget, or shorten the text or its answer"
            )
        return entries

    def _uneven_with_codes(self, table: PageTable, quantized: QuantizedStore, amount: int) -> tuple[int, int]:
        """Return entries per KV head, on average, of heads of any lengths.

        The first number holds if all may fill plain pages, the second if not. An entry takes its bytes as a number, or
        twice its bytes as a code, because of tombstones.
        """
        plain_page, packed_page = table.pool.page_bytes + 4, quantized.pool.page_bytes + 4
        free_bytes = amount // (len(self._windows) * table.n_regions) - 20 - 2 * packed_page
        entry_bytes = max(plain_page / table.pool.slots, 2 * packed_page / quantized.slots)
        all_plain = int((free_bytes - plain_page) / entry_bytes) - self._policy.plan_every
        plain_bytes = -(-(_max_plain(quantized) + self._policy.plan_every) // table.pool.slots) * plain_page
        return all_plain, (free_bytes - plain_bytes) // (2 * packed_page) * quantized.slots

    def _entries_with_codes(self, table: PageTable, quantized: QuantizedStore, amount: int) -> int:
        """Return entries per KV head if the newest are plain and the others codes; 0 if none fit.

        Evictions while decoding leave tombstones, at most as many as entries before their pages are freed.
        """
        max_plain = _max_plain(quantized)
        plain_bytes = -(-(max_plain + self._policy.plan_every) // table.pool.slots) * (table.pool.page_bytes + 4)
        free_bytes = amount // (len(self._windows) * table.n_regions) - 20 - plain_bytes
        pages = free_bytes // (quantized.pool.page_bytes + 4)
        if pages < 1:
            return 0
        return int(max(pages - 2, 0) // 2) * quantized.slots + max_plain - quantized.slots

    def _entries_by_age(self, table: PageTable, amount: int) -> int:
        """Return entries per KV head, on average, whose tiers by age take at most `amount` bytes.

        It is 0 if none do. An entry takes its bytes as a number, or twice its bytes in its tier, because of tombstones.
        """
        parts, pool = table.packed_parts, table.pool
        free_bytes = amount // (len(self._windows) * table.n_regions) - 12 - 8 * len(parts)

        def fits(n: int) -> bool:
            plain = parts[0].codec.newest(n) + parts[0].slots + self._policy.plan_every + pool.slots
            needed_bytes = plain / pool.slots * (pool.page_bytes + 4)
            for part, after in zip(parts, [*parts[1:], None], strict=True):
                n_entries = (
                    n if after is None else after.codec.newest(n) - part.codec.newest(n) + part.slots + after.slots
                )
                needed_bytes += (2 * n_entries / part.slots + 2) * (part.pool.page_bytes + 4)
            return needed_bytes <= free_bytes

        return bisect.bisect_left(range(free_bytes), True, key=lambda n: not fits(n + 1)) if free_bytes > 0 else 0


def _max_plain(quantized: QuantizedStore) -> int:
    """Return the number of plain entries at which a page of codes is made."""
    return quantized.codec.sinks + quantized.codec.residual + quantized.slots


def entries_of(
    budgets: LayerBudgets,
    policy: Policy,
    tracker: PositionTracker,
    layer: int,
    table: PageTable,
    sequence: int,
    seen: int,
) -> int:
    """Return the entries per KV head that a layer may keep of a sequence, kept spans included."""
    return budgets.entries(layer, table, sequence, seen, tracker.marks.kept.count(sequence, policy.protect.sinks))
