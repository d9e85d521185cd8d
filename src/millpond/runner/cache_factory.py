"""Factory of caches for requests with one method, budget and number format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from millpond.budget import Budget
from millpond.cache.batch_cache import BatchCache
from millpond.cache.layer.layer_cache import LayerCache
from millpond.cache.pages.page_table import PageTable
from millpond.cache.pages.pool import PagePool
from millpond.cache.pages.pool_set import PoolSet
from millpond.cache.pages.quantized_pool import QuantizedPool
from millpond.cache.state.positions import PositionTracker
from millpond.cache.state.recurrent_states import StateSlots
from millpond.cache.state.token_ids import TokenIds
from millpond.codec import Codec, resolve
from millpond.errors import OptionError
from millpond.hf.calibration.load import CalibrationSource, calibrated
from millpond.hf.compress import budget_of, policy_of
from millpond.hf.layer_budgets import LayerBudgets, within
from millpond.hf.model_profile import ModelProfile
from millpond.hf.signals.output_projection import attach_output_projections
from millpond.hf.signals.rotary import ModelRotation, attach_rotations
from millpond.hf.tokenizer_source import TokenizerSource
from millpond.policy.needs.declared import Needs
from millpond.runner.carried_states import CarriedStates
from millpond.runner.packed_model import LayerShape, PackedModel

#: Finds the pools of a number format, of entries with masses or without.
FindPools = Callable[[torch.dtype | Codec, bool], PoolSet]


class CacheFactory:
    """Makes stacks of one kind: sequences of the same recipe decode together.

    Args:
        find_pools: where their pages come from. slots: what counts the states of a hybrid. The rest: as of `compress`;
            a budget in bytes is that of one sequence.

    Attributes:
        policy, budget: what is kept. pools: where entries lie.
        whole_prompt: a prompt must be read in one pass, because where it is cut would change the result.
        slots: what counts the states of a hybrid; None for other models.

    Raises:
        OptionError: as `compress`, or the method cannot run with others in one pass; the message says why.
    """

    def __init__(
        self,
        model: PackedModel,
        find_pools: FindPools,
        method: str,
        options: Mapping[str, Any],
        budget: Budget | str | int | float | None,
        codec: str | tuple[str, str],
        tokenizer: PreTrainedTokenizerBase | None = None,
        calibration: CalibrationSource = None,
        slots: StateSlots | None = None,
    ) -> None:
        policy = policy_of(method, dict(options))
        _check_packable(method, policy.needs)
        policy = policy.with_tokens(TokenizerSource(tokenizer))
        self.budget = budget_of(method, budget, policy)
        profile = ModelProfile.of(model.model)  # modules may have been replaced since `model` was made
        self.policy = policy = within(policy, self.budget)
        if self.budget is not None and self.budget.kind == "tokens":
            policy.protect.check(int(self.budget.amount))
        stored = calibrated(resolve(codec), calibration, model.model, profile.n_layers)
        if isinstance(stored, Codec):
            policy.check_codec(stored)
        self.pools = find_pools(stored or model.dtype, policy.mass_bias)
        self.whole_prompt = policy.needs.whole_prompt or (model.states is not None and model.states.restarts)
        self.slots = slots
        self._model = model
        self._rotation = ModelRotation.of(profile) if policy.positions == "cache_relative" else None
        self._budgets = _RequestBudgets(self.budget, policy, [layer.window for layer in model.layers])
        self._pattern = self._cores(PositionTracker(), 0)
        attach_rotations(profile, self._pattern)
        attach_output_projections(profile, self._pattern)

    def stack(self, prompt: int = 0) -> BatchCache:
        """An empty stack; `prompt`: tokens of the prompt that it will read, 0 for sequences that come from others."""
        timeline = PositionTracker()
        if self.policy.needs.token_ids:
            timeline.tokens = TokenIds()
        cores = self._cores(timeline, prompt)
        for core, pattern in zip(cores, self._pattern, strict=True):
            core.attention.rope, core.attention.outputs = pattern.attention.rope, pattern.attention.outputs

        def before_plan() -> None:
            self._budgets.cores = cores

        states = None if self._model.states is None else CarriedStates(self._model.states, self.slots)
        stack = BatchCache(cores, timeline, before_plan, states)
        stack.reading = prompt > 0
        return stack

    def entries(self, layer: int, seen: int, table: PageTable) -> int:
        """Entries per KV head that `layer` may keep of a text of `seen` tokens; the average, where its content says."""
        return self._budgets.expected(layer, table, seen)

    def pool(self, key_dim: int, value_dim: int) -> PagePool:
        """The pool of plain entries of this shape."""
        return self.pools.plain(key_dim, value_dim, self._model.dtype, self._model.device)

    def prompt_pool(self, key_dim: int, value_dim: int) -> PagePool:
        """The pool of entries of this shape while their prompt is read."""
        if self.policy.prefill == "greedy":
            return self.pool(key_dim, value_dim)
        return self.pools.reading(key_dim, value_dim, self._model.dtype, self._model.device)

    def packed_pool(self, layer: LayerShape) -> QuantizedPool | None:
        """The pool of a layer's codes; None where entries are stored as they are."""
        if self.pools.codec is None or (layer.window and self.pools.codec.tiered):
            return None
        return self.pools.packed(layer.index, layer.key_dim, layer.value_dim, self._model.device)

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of one sequence."""
        return 0 if self._model.states is None else self._model.states.nbytes

    def entry_bytes(self, layer: LayerShape) -> int:
        """Bytes of a token's keys and values in one layer, in the model's dtype."""
        return layer.n_kv_heads * (layer.key_dim + layer.value_dim) * self._model.dtype.itemsize

    def _cores(self, timeline: PositionTracker, prompt: int) -> list[LayerCache]:
        def entries(layer: int, table: PageTable, sequence: int, seen: int) -> int:
            return self._budgets.entries(layer, table, sequence, max(seen, prompt))

        return [
            LayerCache(
                index, self.policy, partial(entries, index), self.pools.plain, timeline,
                between_chunks=False, rotation=self._rotation,
                sealed=self.pools.sealed if self.pools.codec is not None else None, reading=self.pools.reading,
            )
            for index in range(len(self._model.layers))
        ]  # fmt: skip


class _RequestBudgets(LayerBudgets):
    """Budgets whose bytes are those of one sequence, whatever else is in its batch."""

    def expected(self, layer: int, table: PageTable, seen: int) -> int:
        """Entries per KV head, before the text is known."""
        if self.budget is not None and self._policy.needs_all_layers:
            return self._average(table, seen)
        return self.entries(layer, table, 0, seen)

    def _entries_of_bytes(self, table: PageTable, amount: int) -> int:
        return super()._entries_of_bytes(table, amount * table.n_seq)


def _check_packable(method: str, needs: Needs) -> None:
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
