"""Factory of caches for requests with one method, budget and number format, and rules of rolling contexts."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from millpond.budget import Budget
from millpond.cache.batch_cache import BatchCache
from millpond.cache.layer.host_layer_cache import HostKV, HostLayerCache
from millpond.cache.layer.layer_cache import LayerCache
from millpond.cache.layer.shared_entries import SharedEntries
from millpond.cache.pages.page_table import PageTable
from millpond.cache.pages.pool_set import PoolSet, pools_by_layer
from millpond.cache.state.positions import PositionTracker
from millpond.cache.state.recurrent_states import StateSlots
from millpond.cache.state.token_ids import TokenIds
from millpond.cache.tiered.disk_tier import DiskTier
from millpond.codec import Codec, CodecSpec, Format, LayerCodecs, before_rope, codecs_of
from millpond.errors import BudgetError, OptionError
from millpond.hf.cache_spec import CacheSpec, policy_of
from millpond.hf.calibration.load import CalibrationSource
from millpond.hf.model_profile import ModelProfile
from millpond.hf.signals.output_projection import attach_output_projections
from millpond.hf.signals.rotary import ModelRotation, attach_rotations, rolling_rotations
from millpond.kernels.decode_rules import Evict
from millpond.option_files import OptionFile
from millpond.policy.policy import Policy
from millpond.policy.rolling import rolling_policy
from millpond.runner.cache_layout import CacheLayout, check_packable
from millpond.runner.packed_model import LayerShape, PackedModel
from millpond.runner.state_mixers import CarriedStates

#: Share of the positions that stay free when gaps have closed, at least: each closing writes all that is held again.
FREE = 1 / 8


def formats_before_rope(stored: LayerCodecs | Format) -> LayerCodecs | Format:
    """Return the same formats with keys stored before RoPE; number formats stay as they are.

    Raises:
        OptionError: a codec whose keys cannot be stored so.
    """

    def before(one: Format) -> Format:
        return before_rope(one) if isinstance(one, Codec) else one

    return stored.map(before) if isinstance(stored, LayerCodecs) else before(stored)


def check_room_to_roll(layout: CacheLayout, layers: Sequence[LayerShape], reach: int) -> None:
    """Check that every layer leaves room for text after its gaps are closed.

    Raises:
        BudgetError: what a layer keeps leaves too few of `reach` positions free.
    """
    max_entries = int(reach * (1 - FREE)) - layout.policy.protect.sinks
    for index, layer in enumerate(layers):
        kept = layout.entries(index, reach, layout.empty_table(layer))
        kept = min(kept, layer.window) if layer.window else kept
        if kept > max_entries:
            raise BudgetError(
                f"budget {layout.budget} keeps {kept:,} entries per KV head in layer {index}, and overflow='rolling' "
                f"needs at most {max_entries:,} of the model's {reach:,} positions, so that text can follow them; "
                "lower the budget"
            )


#: Finds the pools of a number format, of entries with masses or without, in the host's memory or beside the model.
FindPools = Callable[[torch.dtype | Codec, bool, bool], PoolSet]


class CacheFactory(CacheLayout):
    """Factory of batch caches of one kind: sequences of the same factory decode together.

    Args:
        model: Decoder whose layers the caches serve.
        find_pools: Finds the pools that pages come from.
        method: As of `compress`.
        options: As of `compress`.
        budget: As of `compress`; a budget in bytes is that of one sequence.
        codec: As of `compress`.
        tokenizer: As of `compress`.
        calibration: As of `compress`.
        slots: Counts the states of a hybrid; None for other models.
        tier: Disk of the layers whose pages are stored there between passes; None: all stay in memory.
        reach: Positions after which gaps close and a text continues; None: it ends there.
        host_kv: Layers whose pages are in the host's memory while the model is on a device; None: all pages are where
            the model is.
        step_tokens: Tokens of one pass, where prompts are read.
        sampled: Whether the attention of prompts is sampled, for a storage codec.

    Attributes:
        policy: Policy under the budget.
        budget: Budget of one sequence.
        pools: Pools that hold the entries.
        whole_prompt: Whether a prompt must be read in one pass, or be cut at multiples of `piece`, because where it is
            cut would change the result.
        slots: Counts the states of a hybrid; None for other models.
        described: Method, options, budget and format in words: equal where caches are kept alike.

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
        codec: CodecSpec,
        tokenizer: PreTrainedTokenizerBase | None = None,
        calibration: CalibrationSource = None,
        slots: StateSlots | None = None,
        tier: DiskTier | None = None,
        reach: int | None = None,
        host_kv: HostKV | None = None,
        step_tokens: int = 512,
        sampled: bool = False,
    ) -> None:
        policy = policy_of(method, dict(options))
        check_packable(method, policy.needs)
        profile = ModelProfile.of(model.model)  # modules may have been replaced since `model` was made
        spec = CacheSpec.of(
            model.model, profile, policy, method, budget, codec, tokenizer=tokenizer, calibration=calibration
        )
        policy, kept, stored = spec.policy, spec.budget, spec.stored
        if policy.gates is not None and policy.gates.adapter is not None:
            model.check_adapters()
        if tier is not None and policy.needs_all_layers:
            raise OptionError(
                f"method {method!r} compares all layers when it plans, and those on the disk are here one at a time; "
                "keep KV in memory (a plan with kv={'host': 1}), give across=false if the method has it, or use one "
                "that plans each layer alone, such as 'h2o' or 'snapkv'"
            )
        rotations: list[ModelRotation | None] = []
        if reach is not None:
            stored, rotations = formats_before_rope(stored), rolling_rotations(profile)
            policy = rolling_policy(policy, method, bool(codecs_of(stored)))
        CacheSpec(policy, kept, stored).check()
        for storage in codecs_of(stored):
            if model.deterministic and storage.tiered and storage.ages:
                raise OptionError(
                    f"codec {storage.name!r}: its upper tier is read for all sequences together, whose sums may differ "
                    f"in the last bit, and deterministic=True promises equal ones; use {storage.ages[-1].name!r}"
                )
        if host_kv is not None:
            check_on_host(method, policy, host_kv, bool(codecs_of(stored)))
            self.on_host, self.tier_limits = host_kv.layers, host_kv.limits
        pools = pools_by_layer(
            stored,
            profile.n_layers,
            lambda one: find_pools(one or model.dtype, policy.mass_bias, False),
            self.on_host,
            lambda one: find_pools(one or model.dtype, policy.mass_bias, True),
        )
        super().__init__(policy, kept, pools, model.layers, model.dtype, model.device)
        restarts = model.states is not None and model.states.restarts
        self.whole_prompt = policy.needs.whole_prompt or restarts
        lookup = policy.needs.block_lookup
        if lookup is not None and not restarts and self.blocks_leave:
            self.piece = lookup.together * max(1, step_tokens // lookup.together)
        self.slots, self.tier, self.host_kv = slots, tier, host_kv
        self.described = described(method, options, kept, stored or model.dtype, reach)
        self.reach, self._rotations = reach, rotations
        self.on_disk = frozenset() if tier is None else tier.layers
        self._model = model
        self._sampled = sampled and policy.prefill == "once" and policy.positions == "absolute"
        self._rotary = ModelRotation.of(profile) if policy.positions == "cache_relative" else None
        self._template_caches = self._layer_caches(PositionTracker(), 0)
        if reach is not None:
            check_room_to_roll(self, model.layers, reach)
        attach_rotations(profile, self._template_caches)
        attach_output_projections(profile, self._template_caches)

    def make_cache(self, prompt: int = 0) -> BatchCache:
        """Return an empty batch cache.

        Args:
            prompt: Tokens of the prompt that it will read; 0 for sequences that come from other caches.
        """
        tracker = PositionTracker()
        if self.policy.needs.token_ids:
            tracker.tokens = TokenIds()
        layer_caches = self._layer_caches(tracker, prompt)
        for layer_cache, template in zip(layer_caches, self._template_caches, strict=True):
            layer_cache.attention.rotary = template.attention.rotary
            layer_cache.attention.outputs = template.attention.outputs
            layer_cache.attention.shares_runs = not self._model.deterministic

        def before_plan() -> None:
            self._budgets.layer_caches = layer_caches

        states = None if self._model.states is None else CarriedStates(self._model.states, self.slots)
        batch_cache = BatchCache(layer_caches, tracker, before_plan, states, self.tier, self._rotations)
        batch_cache.reading = prompt > 0
        if prompt and self._sampled:
            batch_cache.sample()
        return batch_cache

    @property
    def state_bytes(self) -> int:
        return 0 if self._model.states is None else self._model.states.nbytes

    def _cache_type(self, layer: int) -> Callable[..., LayerCache]:
        """Return what makes the cache of a layer."""
        if self.host_kv is None or layer not in self.host_kv.layers:
            return LayerCache
        return partial(HostLayerCache, host_kv=self.host_kv)

    def _layer_caches(self, tracker: PositionTracker, prompt: int) -> list[LayerCache]:
        def entries(layer: int, table: PageTable, sequence: int, seen: int) -> int:
            kept = tracker.marks.kept.count(sequence, self.policy.protect.sinks)
            return self._budgets.entries(layer, table, sequence, self.within_context(max(seen, prompt)), kept)

        layer_caches = [
            self._cache_type(index)(
                index,
                self.policy,
                partial(entries, index),
                of.plain,
                tracker,
                between_chunks=False,
                rotary=self._rotary,
                quantized=of.make_quantized,
                reading=of.reading,
            )
            for index, of in enumerate(self.pools.by_layer(len(self._model.layers)))
        ]
        for layer_cache, readers in zip(layer_caches, self._model.readers.values(), strict=True):
            layer_cache.shared = SharedEntries() if readers else None
            rule = self.policy.decode_rule(layer_cache.index)
            layer_cache.scores_answers = rule.evict is not Evict.NEVER or self.policy.plans_each_step
        return layer_caches


def check_on_host(method: str, policy: Policy, host_kv: HostKV, has_codes: bool) -> None:
    """Check that the layers of a method can attend on different sides of a link.

    Raises:
        OptionError: it compares all layers, or reads what is on the device for each plan; or values are sparse, and
            entries leave or are in codes.
    """
    if host_kv.sparse is not None and (not policy.keeps_all or policy.needs.block_lookup is not None or has_codes):
        raise OptionError(
            f"plan: values={host_kv.sparse.share:g} reads some values of plain entries that all stay, and method "
            f"{method!r} {'stores codes' if has_codes else 'chooses entries itself'}; take method='full' with "
            "codec='auto', or values=1"
        )
    if not attends_on_host(policy):
        raise OptionError(
            f"method {method!r} compares all layers when it plans, or reads the model's rotation, token ids or trained "
            "weights, which are on the device; keep KV there (a plan with kv={'device': 1}), give across=false if the "
            "method has it, or use one that scores by attention in each layer alone, such as 'h2o' or 'snapkv'"
        )


def attends_on_host(policy: Policy) -> bool:
    """Return whether layers can attend on the host of a device.

    Their plans then read nothing that is elsewhere.
    """
    turns = policy.positions == "cache_relative" or policy.needs_rotation
    return not (policy.needs_all_layers or turns or policy.needs.token_ids or policy.scores_entries)


def described(
    method: str,
    options: Mapping[str, Any],
    budget: Budget | None,
    stored: torch.dtype | Codec | LayerCodecs,
    reach: int | None = None,
) -> str:
    """Return words that are equal where caches are kept alike; files appear as digests."""
    settings = ", ".join(f"{name}={_shown(options[name])}" for name in sorted(options))
    calibration = next((one.calibration for one in codecs_of(stored) if one.calibration is not None), None)
    name = str(stored).removeprefix("torch.") if isinstance(stored, torch.dtype) else stored.name
    tables = "" if calibration is None else f" calibrated {calibration.digest()}"
    means = " less means" if any(tier.key.less_mean for one in codecs_of(stored) for tier in one.tiers) else ""
    rolls = "" if reach is None else f" rolling at {reach}"
    return f"{method}({settings}) budget {budget} {name}{means}{tables}{rolls}"


def _shown(value: object) -> str:
    files = {value: value} if isinstance(value, OptionFile) else getattr(value, "files", {})
    marks = [hashlib.sha256(file.content).hexdigest()[:16] for file in files.values()]
    return " ".join([repr(value), *sorted(marks)])
