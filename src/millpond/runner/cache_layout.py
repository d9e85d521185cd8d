"""Layout of the caches of one method, budget and number format: budgets and pools, known without a model's weights."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cached_property

import torch

from millpond.budget import Budget
from millpond.cache.far_blocks import BlockFormat, Place, place_of
from millpond.cache.pages.page_table import PageTable
from millpond.cache.pages.pool import PagePool, QuantizedPool
from millpond.cache.pages.pool_set import LayerPools
from millpond.cache.pages.tier_limits import TierLimits
from millpond.cache.state.rerotation import positions_ahead
from millpond.codec import Codec
from millpond.errors import OptionError
from millpond.hf.layer_budgets import LayerBudgets
from millpond.policy.needs import Needs
from millpond.policy.policy import Policy
from millpond.policy.scores.attention import Recency
from millpond.runner.layer_demand import LayerDemand, LayerLayout
from millpond.runner.packed_model import LayerShape


class CacheLayout:
    """Layout of the entries of a model's layers: their pools and their numbers.

    Attributes:
        policy: Policy that chooses what is kept.
        budget: Budget of one sequence; None: no limit.
        pools: Pools that hold the entries.
        on_disk: Layers whose pages are stored on a disk between passes.
        on_host: Layers whose pages are in the host's memory, those on a disk among them, while the model is on a device
            and other layers' pages are there; empty where one memory holds all.
        tier_limits: Limits of both memories; None where one memory holds all.
        reach: Positions after which gaps close and a text continues; None: it ends there.
        piece: Tokens at whose multiples a prompt is cut, so that entries leave the pools between its parts; 0: none
            leave, or the prompt is read in one pass.
    """

    on_disk: frozenset[int] = frozenset()
    on_host: frozenset[int] = frozenset()
    tier_limits: TierLimits | None = None
    reach: int | None = None
    piece: int = 0

    def __init__(
        self,
        policy: Policy,
        budget: Budget | None,
        pools: LayerPools,
        layers: Sequence[LayerShape],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.policy, self.budget, self.pools = policy, budget, pools
        self._layers, self._dtype, self._device = layers, dtype, device
        self._budgets = _RequestBudgets(budget, policy, [layer.window for layer in layers])

    def silent(self) -> AbstractContextManager[None]:
        """Return a context without warnings of budgets, for figures of no request."""
        return self._budgets.silent()

    def entries(self, layer: int, seen: int, table: PageTable, kept: int = 0) -> int:
        """Return the entries per KV head that `layer` may keep; an average if content decides.

        Args:
            layer: Index of the layer.
            seen: Tokens of the text.
            table: Pages of the sequence in the layer.
            kept: Tokens that every layer keeps, see `LayerBudgets.entries`.
        """
        return self._budgets.expected(layer, table, self.within_context(seen), kept)

    def within_context(self, seen: int) -> int:
        """Return how many of `seen` tokens may be in memory at a time, before any is evicted."""
        return seen if self.reach is None else min(seen, self.reach)

    def pool(self, layer: LayerShape) -> PagePool:
        """Return the pool of a layer's plain entries."""
        return self.pools.of(layer.index).plain(layer.key_dim, layer.value_dim, self._dtype, self._where(layer))

    def prompt_pool(self, layer: LayerShape) -> PagePool:
        """Return the pool of a layer's entries while their prompt is read."""
        if self.policy.prefill == "greedy":
            return self.pool(layer)
        return self.pools.of(layer.index).reading(layer.key_dim, layer.value_dim, self._dtype, self._where(layer))

    def empty_table(self, layer: LayerShape) -> PageTable:
        """Return an empty table of one sequence, by which budgets in bytes are divided."""
        table, codec = PageTable(self.pool(layer), 1, layer.n_kv_heads), self.codec(layer)
        if codec is not None and codec.tiered:  # how much the lower tier takes decides on the upper one
            quantized = self.pools.of(layer.index).quantized
            table.quantized = quantized(layer.index, 1, layer.n_kv_heads, layer.key_dim, layer.value_dim, self._device)
        return table

    def codec(self, layer: LayerShape) -> Codec | None:
        """Return the codec of a layer's entries in the pool; None where they are stored plain."""
        codec, looks_up = self.pools.of(layer.index).codec, self.policy.needs.block_lookup is not None
        return None if codec is None or (codec.tiered if layer.window else looks_up) else codec

    def packed_pools(self, layer: LayerShape) -> list[QuantizedPool]:
        """Return the pools of a layer's codes, one per age band; [] if entries are stored plain."""
        if self.codec(layer) is None:
            return []
        return self.pools.of(layer.index).packed(layer.index, layer.key_dim, layer.value_dim, self._where(layer))

    def _where(self, layer: LayerShape) -> torch.device:
        """Return the device of a layer's pages."""
        return torch.device("cpu") if layer.index in self.on_host else self._device

    @cached_property
    def layer_layouts(self) -> list[LayerLayout]:
        """Pools and number format of each layer.

        Raises:
            OptionError: a head_dim that the format's groups do not divide.
        """
        evicts_codes = not self.policy.keeps_all and (self.policy.every_step or self.policy.bounded)
        return [
            LayerLayout(
                layer,
                self.pool(layer),
                self.prompt_pool(layer),
                tuple(self.packed_pools(layer)),
                self.codec(layer),
                evicts_codes,
            )
            for layer in self._layers
        ]

    def demands(self, prompt: int, answer: int) -> list[LayerDemand]:
        """Return the demand of each layer for a request of a prompt and answers.

        While the prompt is read all of it is held unquantized, since nothing is planned before its end, or the budget
        and a chunk if each chunk ends with an eviction. Then a layer holds its budget, with as many more entries as its
        method adds before it evicts or merges again; or, for methods that keep all or grow while decoding, those of the
        answer too.

        Args:
            prompt: Tokens of the prompt.
            answer: Most tokens of an answer.
        """
        demands = []
        for index, layer in enumerate(self.layer_layouts):
            table = self.empty_table(layer.shape)
            kept, decoded = self._decode_entries(index, table, prompt, answer)
            read = self._prompt_entries(index, table, prompt)
            demands.append(LayerDemand(layer, read, kept, decoded, prompt, answer))
        return demands

    def _prompt_entries(self, layer: int, table: PageTable, prompt: int) -> int:
        """Return the most entries per KV head of a layer that reads a prompt of `prompt` tokens."""
        policy, prompt = self.policy, self.within_context(prompt)
        if self.piece and self.block_place(self._layers[layer]) is not None:
            return min(prompt, self._resident(layer, table, prompt, prompt) + self.piece)
        if policy.prefill == "once":
            return prompt
        budget = min(prompt, self.entries(layer, prompt, table))
        return min(prompt, budget + (policy.chunk if policy.prefill == "chunks" else 1))

    def _decode_entries(self, layer: int, table: PageTable, prompt: int, answer: int) -> tuple[int, int]:
        """Return the mean entries per KV head after the plan, and the most while decoding."""
        policy, total = self.policy, prompt + answer
        window = self._layers[layer].window
        if policy.keeps_all:
            before, after = (self._resident(layer, table, prompt, seen) for seen in (prompt, total))
        else:
            budget = self.entries(layer, total if policy.grows else prompt, table)
            before = min(prompt, budget)
            if policy.bounded and table.quantized is not None:
                self.entries(layer, total, table)  # the upper tier shrinks as the text grows: it must end with room
            if policy.bounded:
                after = min(total, budget + policy.plan_every)
            elif policy.heads_may_keep_all:
                before, after = prompt, total
            elif policy.every_step:
                after = min(total, budget + policy.plan_every)
            else:
                after = before + answer
        if window:
            before, after = min(before, window), min(after, window + policy.plan_every)
        return before, max(before, after)

    def block_place(self, layer: LayerShape) -> Place | None:
        """Return where blocks of a layer go that queries look up.

        None: they stay in the pool, or there are none.
        """
        lookup = self.policy.needs.block_lookup
        if lookup is None or layer.window:
            return None
        return place_of(lookup.offload, self.pools.of(layer.index).codec, self._where(layer))

    @property
    def blocks_leave(self) -> bool:
        """Whether blocks of some layers leave the pools."""
        return any(self.block_place(layer) is not None for layer in self._layers)

    def _resident(self, layer: int, table: PageTable, prompt: int, seen: int) -> int:
        """Return the most entries per KV head that a layer has in its pool of `seen` tokens.

        Besides sinks and newest ones these are entries that fill no block yet, with those of a step.
        """
        lookup = self.policy.needs.block_lookup
        if lookup is None or self.block_place(self._layers[layer]) is None:
            return seen
        return min(seen, lookup.protect.sinks + self._local(layer, table, prompt) + lookup.protect.block)

    def _local(self, layer: int, table: PageTable, prompt: int) -> int:
        """Return the newest entries that every query of a layer sees where blocks are looked up."""
        lookup = self.policy.needs.block_lookup
        assert lookup is not None, "blocks are looked up"
        return lookup.protect.local(self.entries(layer, self.within_context(prompt), table))

    def _block_bytes(self, prompt: int, total: int) -> int:
        """Return the bytes of blocks outside of the pools.

        They are those in the same memory, and those of one layer that come back. Blocks on a disk, or in the host's
        memory while the pool is on a device, do not count.
        """
        lookup = self.policy.needs.block_lookup
        held, back = 0, [0]
        for index, layer in enumerate(self._layers if lookup is not None else ()):
            place = self.block_place(layer)
            if lookup is None or place is None:
                continue
            table, size = self.empty_table(layer), lookup.protect.block
            n_blocks = max(total - lookup.protect.sinks - self._local(index, table, prompt), 0) // size
            looked_up = lookup.protect.blocks(self.entries(index, self.within_context(prompt), table))
            back.append(min(n_blocks, looked_up) * size * self.entry_bytes(layer))
            if place == "host" and self._where(layer).type == "cpu":
                form = BlockFormat(place, size, self.pools.of(layer.index).codec)
                held += n_blocks * form.nbytes(layer.n_kv_heads, (layer.key_dim, layer.value_dim), self._dtype)
        return held + max(back)

    @property
    def state_bytes(self) -> int:
        """Bytes of the recurrent and convolution states of one sequence: none, but for hybrids."""
        return 0

    def check_prompt(self, n_tokens: int) -> None:
        """Refuse a prompt of `n_tokens` tokens whose plan would fail, before it is read.

        Raises:
            OptionError: its options cut so long a prompt into too many parts. BudgetError: they protect more than the
                budget of a layer, or the budget holds nothing.
        """
        self.policy.check_prompt(n_tokens)
        if self.policy.keeps_all:
            return
        for index, layer in enumerate(self._layers):
            budget = self.entries(index, n_tokens, self.empty_table(layer))
            if not layer.window or budget < layer.window:
                self.policy.check_budget(budget)

    def unpaged_bytes(self, prompt: int, total: int) -> int:
        """Return the bytes that a sequence holds outside its pages, in all layers.

        These are queries of the prompt, at most the number that its plan looks at; the keys of sinks that move, as they
        were before RoPE and at the next positions; the keys by which blocks are looked up; and blocks outside of the
        pools in the same memory, with those of one layer that come back.

        Args:
            prompt: Tokens of the prompt.
            total: Tokens of the prompt and the answer.
        """
        policy, size = self.policy, self._dtype.itemsize
        wide = max(size, torch.float32.itemsize)
        queries = prompt if policy.needs.head_rules is not None else min(policy.window, prompt)
        moves = policy.positions == "cache_relative" and isinstance(policy.score, Recency)
        sinks = policy.protect.sinks if moves else 0
        lookup = policy.needs.block_lookup
        blocks = 0 if lookup is None else total // lookup.protect.block
        return self._block_bytes(prompt, total) + sum(
            layer.key_dim * layer.n_queries * (queries * size + blocks * wide)
            + layer.key_dim * layer.n_kv_heads * sinks * (wide + positions_ahead(sinks) * size)
            for layer in self._layers
        )

    def entry_bytes(self, layer: LayerShape) -> int:
        """Return the bytes of a token's keys and values in one layer, in the model's dtype."""
        return layer.n_kv_heads * (layer.key_dim + layer.value_dim) * self._dtype.itemsize


class _RequestBudgets(LayerBudgets):
    """Budgets whose bytes are those of one sequence, whatever else is in its batch."""

    def expected(self, layer: int, table: PageTable, seen: int, kept: int = 0) -> int:
        """Return entries per KV head, before the text is known."""
        if self.budget is not None and self._policy.needs_all_layers:
            return self._average(table, seen, kept)
        return self.entries(layer, table, 0, seen, kept)

    def _entries_of_bytes(self, table: PageTable, amount: int, seen: int) -> int:
        return super()._entries_of_bytes(table, amount * table.n_seq, seen)


def check_packable(method: str, needs: Needs) -> None:
    """Check that a method runs on packed rows of several sequences.

    Raises:
        OptionError: the method cannot run with others in one pass; the message says why.
    """
    if needs.prompt_repeat is not None:
        raise OptionError(
            f"method {method!r} lets the model repeat each prompt before it plans, which the engine does not do; use "
            "compress(model, ...).generate, or another method"
        )
    if needs.entropies is not None:
        raise OptionError(
            f"method {method!r} looks at the predictions for every token, which the engine does not make; use "
            "compress(model, ...).generate, or another method"
        )
