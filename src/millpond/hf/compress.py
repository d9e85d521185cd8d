"""Entry point of the library: a cache with a budget for a model, and attention that feeds it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from millpond.budget import DEFAULT, Budget, parse_bytes
from millpond.cache.pages.memory_limit import MemoryLimit
from millpond.cache.pages.pool import DEFAULT_SLOTS, check_slots
from millpond.cache.pages.pool_set import LayerPools, PoolSet, pools_by_layer
from millpond.codec import CodecSpec, Format, LayerCodecs, codec_text, codecs_of, resolve
from millpond.errors import BudgetError, OptionError, UnsupportedModelError
from millpond.hf.attention import switch_attention
from millpond.hf.cache import MillpondCache
from millpond.hf.calibration.load import CalibrationSource, calibrated, ropes_of
from millpond.hf.fit import FitSource, check_given
from millpond.hf.fit import chosen as chosen_row
from millpond.hf.generation import use_generate
from millpond.hf.key_biases import loses_by_bias, warn_of_bias, with_key_scales
from millpond.hf.layer_budgets import within
from millpond.hf.model_profile import ModelProfile, entry_dims
from millpond.hf.model_support import supported, unwrapped
from millpond.hf.native_layers.decoder_layers import use_native_layers
from millpond.hf.retaining_heads import gates_finder, heads_finder
from millpond.hf.shared_keys import check_shared
from millpond.hf.signals.output_projection import attach_output_projections
from millpond.hf.signals.rotary import ModelRotation
from millpond.hf.tokenizer_source import TokenizerSource
from millpond.methods import METHODS
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
    """Give `model` a KV cache that keeps inside a budget, and switch its attention to the one that feeds it.

    Args:
        model: any transformers decoder that uses the attention interface, also inside a PEFT model with adapters or
            what `torch.compile` returned.
        method: what is kept; `millpond.list_methods()` names them. Or a `millpond.policy.policy.Policy` of your own.
            None: nothing is evicted, and without a codec every entry is stored in 8 bits (the preset `light`); with a
            budget, `h2o`.
        budget: per KV head: "20%" of each sequence's own prompt, or 512 tokens; or "64MiB" for the whole cache. Left
            out, 20 % of the prompt and at least 512 tokens (`millpond.budget.DEFAULT`); `full` and `minference` take
            none, and `attention_gate` and `fastgen` need none. Of `infllm`, which stores everything, it is what is
            attended to. "auto" takes budget and codec from a table of `millpond fit`: those with the fewest bytes that
            keep `max_kl`.
        codec: how entries are stored; "auto" stores what the model computes, `millpond.list_codecs()` names the others.
            A pair ("bf16", "int4"), or "bf16+int4", is keys and values apart. Formats in few bits keep the newest
            entries as they are. {"0-1": "bf16", "*": "int4"}, or "0-1=bf16,*=int4", gives layers formats of their own,
            counted among those that hold entries; "bf16:20%,int8:20%,int4" gives entries fewer bits as they grow old.
        preset: method, budget and codec in one word, in place of the three: see `millpond.preset`.
        memory_limit: most bytes that the page pool may hold ("2GiB"); beyond it PoolFullError is raised.
        page_slots: entries per page, a power of two; pages of codes have the size that their groups need.
        between_chunks: plan after every multi-token pass, so that a prompt in chunks stays inside the budget; False
            plans once, when the prompt is complete, so that the chunk size changes nothing (it is complete when the
            first pass of one token comes: choose a size that leaves no single token for the last chunk). Of what is
            given in one pass, `generate` reads long prompts in parts by itself, where that changes nothing.
        native_layers: decoding on a CPU reads the model's weights at the speed of memory too, where that is not a
            training pass, and passes layers built as Llama's in a few calls; False leaves them to transformers and
            torch. Their results agree up to rounding.
        tokenizer: the model's; methods that read what tokens are (`fastgen`, `kvzip`) know from it.
        calibration: the file that `millpond calibrate` made of this model, for the codecs `kvquant2` to `kvquant4`.
        max_kl: with budget="auto", what the KL of the predictions against the full cache's stays below in 95 % of texts
            like the one that was measured, in nats per token.
        fit: with budget="auto", the table of this model and method, or its file; None: where `millpond fit` puts it. A
            `codec` other than "auto" restricts the choice to it.
        attach: inside the cache's `with` block, and in the thread that entered it, `model.generate` without a cache
            uses this one, a new prompt at each call (a text that the cache was given otherwise, by a pass, a document
            or a fork, is continued where the prompt begins with it); and a prompt that does not continue where a cache
            that is passed has ended is refused. False leaves `generate` alone.
        **options: of the named method; see its signature. A policy has its own settings and takes none.

    Returns:
        A cache to pass as `cache` (or as `past_key_values`, its name before transformers 5.24; both work with any
        version). Its `close`, or the end of a `with` block, gives the model its own attention back.

    Raises:
        UnsupportedModelError: the model bypasses the attention interface, or the method does not fit a hybrid or
            layers that share keys.
        OptionError: an unknown method, option or codec, a value out of range, or options given with a policy.
        BudgetError: a budget that cannot be parsed, or is smaller than what the method protects.
        CacheMismatchError: a calibration of another model. DataError: one that cannot be read.
    """
    model = unwrapped(model)
    profile = supported(model)
    picked = choose(method, budget, codec, preset, evicting=bool(options))
    if picked.usual:
        picked = picked.on(entry_dims(profile))
    method, budget, codec = picked.method, picked.budget, picked.codec
    if check_given(budget, max_kl, fit):
        row = chosen_row(model, method, options, codec, max_kl, fit)
        budget, codec = row.budget, row.codec
    page_slots = number(page_slots)
    check_slots(page_slots)
    policy = policy_of(method, options).with_tokens(TokenizerSource(tokenizer))
    policy = policy.with_heads(heads_finder(model)).with_gates(gates_finder(model))
    chosen = budget_of(method, budget, policy)
    if chosen is not None and chosen.kind == "tokens":
        policy.check_budget(int(chosen.amount))
    policy = within(policy, chosen)
    limit = None if memory_limit is None else parse_bytes(memory_limit)
    if profile.state_layers and policy.needs.prompt_repeat is not None:
        raise UnsupportedModelError(
            f"method {method!r} repeats the prompt, and takes it back after: the states of layers "
            f"{', '.join(map(str, profile.state_layers))} of this hybrid cannot go back; use another method"
        )
    check_shared(profile, policy, method if isinstance(method, str) else "a policy")
    if policy.prefill == "chunks" and profile.latent is not None:
        raise UnsupportedModelError(
            f"{profile.name} expands the latents (MLA) of all that is kept in each pass, so nothing can leave inside "
            "it; use prefill='once'"
        )
    stored = with_key_scales(calibrated(resolve(codec), calibration, model, profile.n_layers), profile, model)
    for one in codecs_of(stored):
        if loses_by_bias(one):
            warn_of_bias(one, model)
        policy.check_codec(one)
        if one.tiered and chosen is not None and chosen.kind == "bytes":
            raise BudgetError(
                f"budget {chosen}: with codec {one.name!r} nothing leaves, so no number of bytes is kept; give "
                "tokens or a share for the upper tier, and memory_limit for the bytes"
            )
        if profile.latent is not None:
            raise OptionError(
                f"codec {one.name!r}: this model stores latents (MLA), which have no groups of channels; use "
                "codec='bf16'"
            )
    check_bytes_by_layer(stored, policy, chosen)
    account = MemoryLimit(limit)

    def pool_set(one: Format) -> PoolSet:
        return PoolSet(one, page_slots, account, masses=policy.mass_bias, ropes=ropes_of(one, profile))

    pools = pools_by_layer(stored, profile.n_layers, pool_set)
    settings: dict[str, Any] = {
        "method": method,
        "codec": codec_text(codec),
        "budget": None if chosen is None else [chosen.kind, chosen.amount, chosen.at_least],
        "page_slots": page_slots,
        "between_chunks": between_chunks,
        "options": options,
        "calibration": os.fspath(calibration) if isinstance(calibration, os.PathLike) else calibration,
    }
    return _Maker(
        policy, chosen, pools, between_chunks, native_layers, attach, settings if isinstance(method, str) else None
    ).make(model, profile)


@dataclass(frozen=True)
class _Maker:
    """Makes caches of one kind, which share their pools."""

    policy: Policy
    budget: Budget | None
    pools: LayerPools
    between_chunks: bool
    native_layers: bool
    attach: bool
    settings: dict[str, Any] | None

    def make(self, model: PreTrainedModel, profile: ModelProfile | None = None) -> MillpondCache:
        """An empty cache, which the model attends through from now on.

        Args:
            profile: of the model as it is now; None: read it.
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
        if self.native_layers:
            cache.on_close(use_native_layers(model))
        if self.attach:
            cache.on_close(use_generate(model, cache))
        return cache


def check_bytes_by_layer(stored: LayerCodecs | Format, policy: Policy, budget: Budget | None) -> None:
    """
    Raises:
        BudgetError: bytes that all layers compete for, whose entries have different sizes.
    """
    if isinstance(stored, LayerCodecs) and budget is not None and budget.kind == "bytes" and policy.needs_all_layers:
        raise BudgetError(
            f"budget {budget}: this method lets all layers compete for entries, which codec {stored.name!r} stores in "
            "different sizes, so no number of entries has these bytes; give tokens or a share, or one codec"
        )


def policy_of(method: str | Policy, options: dict[str, Any]) -> Policy:
    if isinstance(method, str):
        return METHODS.get(method)(**options)
    if not isinstance(method, Policy):
        raise OptionError(f"method={method!r} is neither the name of a method nor a Policy")
    if options:
        raise OptionError(f"{', '.join(options)}: options belong to a named method; a Policy has its own settings")
    return method


def budget_of(method: str | Policy, budget: str | int | float | Budget | None, policy: Policy) -> Budget | None:
    if not policy.takes_budget:
        if budget is not None:
            named = f"method {method!r}" if isinstance(method, str) else "this policy"
            raise BudgetError(f"{named} keeps everything and takes no budget; leave it out, or use memory_limit")
        return None
    if budget is None and not policy.needs_budget:
        return None
    chosen = DEFAULT if budget is None else Budget.parse(budget)
    if policy.keeps_all and chosen.kind == "bytes":
        raise BudgetError(
            f"budget {chosen}: this method keeps everything, and its budget is what is attended to; give tokens or a "
            "share, and memory_limit for the bytes"
        )
    return chosen
