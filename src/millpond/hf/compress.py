"""Entry point of the library: a cache with a budget for a model, and attention that feeds it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from millpond.budget import Budget, parse_bytes
from millpond.cache.pages.memory_limit import MemoryLimit
from millpond.cache.pages.pool import DEFAULT_SLOTS, check_slots
from millpond.cache.pages.pool_set import LayerPools, PoolSet, pools_by_layer
from millpond.codec import CodecSpec, Format, codec_text, codecs_of
from millpond.errors import OptionError, UnsupportedModelError
from millpond.hf.adapter import ALL, use_adapter
from millpond.hf.attention import switch_attention
from millpond.hf.cache import MillpondCache
from millpond.hf.cache_spec import CacheSpec, policy_of
from millpond.hf.calibration.load import CalibrationSource, ropes_of
from millpond.hf.fit import FitSource, check_given
from millpond.hf.fit import chosen as chosen_row
from millpond.hf.generation import use_generate
from millpond.hf.key_biases import loses_by_bias, warn_of_bias
from millpond.hf.layer import give_inputs
from millpond.hf.model_profile import ModelProfile, entry_dims
from millpond.hf.model_support import supported, unwrapped
from millpond.hf.native_layers.decoder_layers import use_native_layers
from millpond.hf.native_layers.recorded_forward import use_recorded_forward
from millpond.hf.signals.output_projection import attach_output_projections
from millpond.hf.signals.rotary import ModelRotation
from millpond.policy.matched_merge import MatchAttention
from millpond.policy.policy import Policy
from millpond.presets import choose
from millpond.scalar import number


def compress(
    model: PreTrainedModel,
    method: str | Policy | None = None,
    budget: str | int | float | Budget | None = None,
    codec: CodecSpec = "auto",
    *,
    preset: str | None = None,
    memory_limit: str | int | None = None,
    page_slots: int = DEFAULT_SLOTS,
    between_chunks: bool = True,
    native_layers: bool = True,
    tokenizer: PreTrainedTokenizerBase | None = None,
    calibration: CalibrationSource = None,
    max_kl: float | None = None,
    fit: FitSource = None,
    attach: bool = True,
    **options: Any,
) -> MillpondCache:
    """Give `model` a KV cache that stays inside a budget, and let its attention use it.

    Args:
        model: Any transformers decoder that uses the attention interface, also inside a PEFT model with adapters or a
            model of `torch.compile`.
        method: Name of the method that chooses the kept entries; `millpond.list_methods()` names them. Or a
            `millpond.policy.policy.Policy` of your own. None: nothing is evicted, and without a codec every entry is
            stored in 8 bits (the preset `light`); with a budget, `h2o`.
        budget: Budget per KV head: "20%" of each sequence's own prompt, or 512 tokens; or "64MiB" for the whole cache.
            None: 20 % of the prompt and at least 512 tokens (`millpond.budget.DEFAULT`); `full` and `minference` take
            none, and `attention_gate` and `fastgen` need none. For `infllm`, which stores everything, it limits what is
            attended to. "auto" takes budget and codec from a table of `millpond fit`: those with the fewest bytes that
            keep `max_kl`.
        codec: Format of stored entries; "auto" stores what the model computes, `millpond.list_codecs()` names the
            others. A pair ("bf16", "int4"), or "bf16+int4", gives keys and values different formats. Formats in few
            bits keep the newest entries as they are. {"0-1": "bf16", "*": "int4"}, or "0-1=bf16,*=int4", gives layers
            formats of their own, counted among those that hold entries; "bf16:20%,int8:20%,int4" gives entries fewer
            bits as they grow old.
        preset: Method, budget and codec in one word, in place of the three: see `millpond.preset`.
        memory_limit: Most bytes that the page pool may hold ("2GiB"); beyond it PoolFullError is raised.
        page_slots: Entries per page, a power of two; pages of codes have the size that their groups need.
        between_chunks: Whether to plan after every multi-token pass, so that a prompt in chunks stays inside the
            budget; False plans once, when the prompt is complete, so that the chunk size changes nothing (it is
            complete when the first pass of one token comes: choose a size that leaves no single token for the last
            chunk). `generate` itself reads long prompts of one pass in parts, if that changes nothing.
        native_layers: Whether decoding on a CPU reads the model's weights at the speed of memory too, except in a
            training pass, and passes layers built as Llama's in a few calls; and whether decoding on a GPU replays all
            layers as one recorded step, where nobody looks inside the model. False leaves them to transformers and
            torch. Their results agree up to rounding.
        tokenizer: Tokenizer of the model, for methods that read properties of tokens (`fastgen`, `kvzip`).
        calibration: File that `millpond calibrate` made of this model, for the codecs `kvquant2` to `kvquant4`.
        max_kl: With budget="auto", bound of the KL of the predictions against the full cache's in 95 % of texts like
            the one that was measured, in nats per token.
        fit: With budget="auto", the table of this model and method, or its file; None for the path of `millpond fit`. A
            `codec` other than "auto" restricts the choice to it.
        attach: Whether, inside the cache's `with` block and in the thread that entered it, `model.generate` without a
            cache uses this one, a new prompt at each call (a text that the cache was given otherwise, by a pass, a
            document or a fork, is continued if the prompt begins with it); and a prompt that does not continue the text
            of a passed cache is refused. False leaves `generate` alone.
        **options: Options of the named method; see its signature. A policy has its own settings and takes none.

    Returns:
        A cache to pass as `cache` (or as `past_key_values`, its name before transformers 5.24; both work with any
        version). Its `close`, or the end of a `with` block, restores the model's own attention.

    Raises:
        UnsupportedModelError: the model bypasses the attention interface, or the method does not fit a hybrid or layers
            that share keys.
        OptionError: an unknown method, option or codec, a value out of range, or options given with a policy.
        BudgetError: a budget that cannot be parsed, or is smaller than what the method protects.
        CacheMismatchError: a calibration of another model.
        DataError: a calibration that cannot be read.
    """
    model = unwrapped(model)
    profile = supported(model)
    selected = choose(method, budget, codec, preset, evicting=bool(options))
    if selected.usual:
        selected = selected.on(entry_dims(profile))
    method, budget, codec = selected.method, selected.budget, selected.codec
    if check_given(budget, max_kl, fit):
        row = chosen_row(model, method, options, codec, max_kl, fit)
        budget, codec = row.budget, row.codec
    page_slots = number(page_slots)
    check_slots(page_slots)
    policy = policy_of(method, options)
    limit = None if memory_limit is None else parse_bytes(memory_limit)
    spec = CacheSpec.of(model, profile, policy, method, budget, codec, tokenizer=tokenizer, calibration=calibration)
    policy, cache_budget = spec.policy, spec.budget
    if profile.state_layers and policy.needs.prompt_repeat is not None:
        raise UnsupportedModelError(
            f"method {method!r} repeats the prompt, and then takes the repetition back: the states of layers "
            f"{', '.join(map(str, profile.state_layers))} of this hybrid cannot go back; use another method"
        )
    acts_inside = policy.prefill == "chunks" or policy.needs.prompt_flags is not None
    if acts_inside and profile.latent is not None:
        raise UnsupportedModelError(
            f"{profile.name} expands the latents (MLA) of all kept entries in each pass, so none can be evicted inside "
            f"it; use {policy.needs.whole_prompt_option}"
        )
    if isinstance(policy.merge, MatchAttention) and profile.latent is not None:
        raise UnsupportedModelError(
            f"method {method!r} fits values, and the latents (MLA) of {profile.name} are its keys too; use 'kvzip'"
        )
    spec.check()
    for storage in codecs_of(spec.stored):
        if loses_by_bias(storage):
            warn_of_bias(storage, model)
        if profile.latent is not None:
            raise OptionError(
                f"codec {storage.name!r}: this model stores latents (MLA), which have no groups of channels; use "
                "codec='bf16'"
            )
    shared_limit = MemoryLimit(limit)

    def pool_set(storage: Format) -> PoolSet:
        return PoolSet(storage, page_slots, shared_limit, masses=policy.mass_bias, ropes=ropes_of(storage, profile))

    pools = pools_by_layer(spec.stored, profile.n_layers, pool_set)
    settings: dict[str, Any] = {
        "method": method,
        "codec": codec_text(codec),
        "budget": None if cache_budget is None else [cache_budget.kind, cache_budget.amount, cache_budget.at_least],
        "page_slots": page_slots,
        "between_chunks": between_chunks,
        "options": options,
        "calibration": os.fspath(calibration) if isinstance(calibration, os.PathLike) else calibration,
    }
    return _Maker(
        policy,
        cache_budget,
        pools,
        between_chunks,
        native_layers,
        attach,
        settings if isinstance(method, str) else None,
    ).make(model, profile)


@dataclass(frozen=True)
class _Maker:
    """Maker of caches of one kind, which share their pools."""

    policy: Policy
    budget: Budget | None
    pools: LayerPools
    between_chunks: bool
    native_layers: bool
    attach: bool
    settings: dict[str, Any] | None

    def make(self, model: PreTrainedModel, profile: ModelProfile | None = None) -> MillpondCache:
        """Return an empty cache, which the model attends through from now on.

        Args:
            model: Model of the cache.
            profile: Profile of the model in its current state; None to read it.
        """
        profile, policy = profile or ModelProfile.of(model), self.policy
        cache = MillpondCache(
            model,
            profile,
            policy,
            self.budget,
            pools=self.pools,
            between_chunks=self.between_chunks,
            rotary=ModelRotation.of(profile) if policy.positions == "cache_relative" else None,
            croppable=policy.keeps_all and not policy.takes_budget and not profile.sliding,
        )
        cache.settings, cache.attaches, cache.make_another = self.settings, self.attach, self.make
        attach_output_projections(profile, cache.layer_caches)
        cache.on_close(switch_attention(profile.config))
        if policy.gates is not None and policy.gates.adapter is not None:
            passes = cache.passes
            cache.on_close(use_adapter(profile, policy.gates.adapter, lambda: ALL if passes.running else None))
        if policy.reads_hidden:
            cache.on_close(give_inputs(profile, cache.layers, cache.passes))
        if self.native_layers:
            cache.on_close(use_native_layers(model))
            cache.on_close(use_recorded_forward(model, profile, cache))
        if self.attach:
            cache.on_close(use_generate(model, cache))
        return cache
