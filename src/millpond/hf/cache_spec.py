"""Policy, budget and number formats of the caches of one kind, read from the names of a caller and checked together."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from millpond.budget import DEFAULT, Budget
from millpond.codec import CodecSpec, Format, LayerCodecs, codecs_of, resolve
from millpond.errors import BudgetError, OptionError
from millpond.hf.calibration.load import CalibrationSource, calibrated
from millpond.hf.key_biases import with_key_scales
from millpond.hf.model_profile import ModelProfile
from millpond.hf.retaining_heads import gates_finder, heads_finder, networks_finder
from millpond.hf.shared_keys import check_shared
from millpond.hf.signals.output_projection import check_output_projections
from millpond.hf.tokenizer_source import TokenizerSource
from millpond.methods import make_policy
from millpond.policy.policy import Policy


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """Policy, budget and number formats of the caches of one kind.

    Attributes:
        policy: Policy under the budget.
        budget: Budget of a cache; None for no limit.
        stored: Number format of its entries, or of those of each layer.
    """

    policy: Policy
    budget: Budget | None
    stored: LayerCodecs | Format

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        profile: ModelProfile,
        policy: Policy,
        method: str | Policy,
        budget: Budget | str | int | float | None,
        codec: CodecSpec,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        calibration: CalibrationSource = None,
    ) -> CacheSpec:
        """Return the spec of caches of a model; its formats are checked by `check`.

        Args:
            model: The model.
            profile: Profile of the model.
            policy: Policy of the method, see `policy_of`.
            method: See `compress`, as are the others.
            budget: See there.
            codec: See there.
            tokenizer: See there.
            calibration: See there.

        Raises:
            UnsupportedModelError: the method does not fit layers that share keys, or the format weighs values by an
                output projection that cannot be read.
            OptionError: no such codec, or its calibration is missing.
            BudgetError: a budget that cannot be parsed, or is smaller than what the method protects.
            CacheMismatchError: a calibration of another model.
            DataError: a calibration that cannot be read.
        """
        policy = policy.with_tokens(TokenizerSource(tokenizer))
        policy = policy.with_heads(heads_finder(model)).with_gates(gates_finder(model))
        policy = policy.with_networks(networks_finder(model))
        cache_budget = budget_of(method, budget, policy)
        policy = bounded_policy(policy, cache_budget)
        check_shared(profile, policy, method if isinstance(method, str) else "a policy")
        stored = calibrated(resolve(codec), calibration, model, profile.n_layers)
        if any(one.prune_values for one in codecs_of(stored)):
            check_output_projections(profile)
        return cls(policy, cache_budget, with_key_scales(stored, profile, model))

    def check(self) -> None:
        """Check the number formats.

        Raises:
            OptionError: the policy does not go with one of them.
            BudgetError: bytes that all layers compete for, whose entries have different sizes.
        """
        for codec in codecs_of(self.stored):
            self.policy.check_codec(codec)
        in_bytes = self.budget is not None and self.budget.kind == "bytes"
        if isinstance(self.stored, LayerCodecs) and in_bytes and self.policy.needs_all_layers:
            raise BudgetError(
                f"budget {self.budget}: this method lets all layers compete for entries, which codec "
                f"{self.stored.name!r} stores in different sizes, so no number of entries has these bytes; give "
                "across=false if the method has it, tokens or a share, or one codec"
            )


def policy_of(method: str | Policy, options: dict[str, Any]) -> Policy:
    """Return the policy of a method.

    Raises:
        OptionError: no such method or option, or options beside a policy.
    """
    if isinstance(method, str):
        return make_policy(method, options)
    if not isinstance(method, Policy):
        raise OptionError(f"method={method!r} is neither the name of a method nor a Policy")
    if options:
        raise OptionError(f"{', '.join(options)}: options belong to a named method; a Policy has its own settings")
    return method


def budget_of(method: str | Policy, budget: str | int | float | Budget | None, policy: Policy) -> Budget | None:
    """Return the budget of a cache; None for no limit.

    Raises:
        BudgetError: a budget that cannot be parsed, or that the method does not take.
    """
    if not policy.takes_budget:
        if budget is not None:
            named = f"method {method!r}" if isinstance(method, str) else "this policy"
            raise BudgetError(f"{named} keeps everything and takes no budget; leave it out, or use memory_limit")
        return None
    if budget is None and not policy.needs_budget:
        return None
    parsed = DEFAULT if budget is None else Budget.parse(budget)
    if policy.keeps_all and parsed.kind == "bytes":
        raise BudgetError(
            f"budget {parsed}: this method keeps everything, and its budget is what is attended to; give tokens or a "
            "share, and memory_limit for the bytes"
        )
    return parsed


def bounded_policy(policy: Policy, budget: Budget | None) -> Policy:
    """Return the policy under a budget: one in bytes bounds what grows while decoding too.

    Raises:
        BudgetError: a budget in tokens that is smaller than what the policy protects.
    """
    if budget is not None and budget.kind == "tokens":
        policy.check_budget(int(budget.amount))
    return replace(policy, bounded=True) if budget is not None and budget.kind == "bytes" else policy
