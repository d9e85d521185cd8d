"""The decode groups of an engine, by cache options, and the pools that they share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from millpond.budget import Budget
from millpond.cache.layer.host_layer_cache import HostKV
from millpond.cache.pages.memory_limit import MemoryLimit
from millpond.cache.pages.pool_set import PoolSet
from millpond.cache.pages.tier_limits import TierLimits
from millpond.cache.state.recurrent_states import StateSlots
from millpond.cache.tiered.disk_tier import DiskTier
from millpond.codec import Codec, CodecSpec, codec_text
from millpond.engine.decode_group import DecodeGroup
from millpond.engine.request import CacheOptions
from millpond.errors import DataError, OptionError
from millpond.hf.cache_spec import policy_of
from millpond.hf.calibration.load import CalibrationSource, needs_calibration, ropes_of
from millpond.hf.fit import Fit, FitRow, FitSource, check_given, chosen, default_path, is_auto, load_fit
from millpond.hf.model_profile import ModelProfile
from millpond.methods import METHODS
from millpond.option_files import OptionFile, only_listed
from millpond.presets import choose
from millpond.runner.cache_factory import CacheFactory
from millpond.runner.packed_model import PackedModel

#: Idle groups that are kept.
IDLE = 64
#: Requested options whose completion with the defaults is remembered.
COMPLETED = 256


class DecodeGroups:
    """Makes groups when a request first needs one, and keeps them.

    Args:
        model: The model.
        defaults: Options of requests that name none.
        memory_limit: Limit that all pools share.
        page_slots: Entries per page.
        tokenizer: Tokenizer of the model.
        calibration: Calibration of the model, for the codecs that need one.
        tier: Disk for KV; None: all is in memory.
        reach: Positions after which gaps close and a text continues; None: it ends there.
        fit: Table of requests with budget="auto"; None: that of the user's cache folder.
        named: Whether a method, budget or format was given for the engine.
        floor: Least tokens of a share, see `EngineConfig`.
        host_kv: Layers whose pages are in the host's memory while the model is on a device; None: there are none.
        step_tokens: Tokens of one step, where prompts are read.
        sampled: Whether the attention of prompts is sampled, for a storage codec.

    Attributes:
        reach: Positions after which gaps close and a text continues; None: it ends there.
    """

    def __init__(
        self,
        model: PackedModel,
        defaults: CacheOptions,
        memory_limit: MemoryLimit,
        page_slots: int,
        tokenizer: Any,
        calibration: CalibrationSource = None,
        tier: DiskTier | None = None,
        reach: int | None = None,
        fit: FitSource = None,
        named: bool = True,
        floor: int = 0,
        host_kv: HostKV | None = None,
        step_tokens: int = 512,
        sampled: bool = False,
    ) -> None:
        self.reach, self._named, self._floor = reach, named, floor
        self.defaults = defaults
        self._model = model
        self._memory_limit = memory_limit
        self._page_slots = page_slots
        self._tokenizer = tokenizer
        self._calibration, self._tier, self._host_kv = calibration, tier, host_kv
        self._step_tokens, self._sampled = step_tokens, sampled
        self._fit, self._fits = fit, dict[str, Fit]()
        self._groups: dict[tuple[Any, ...], DecodeGroup] = {}
        self._pools: dict[tuple[Any, ...], PoolSet] = {}
        self._slots = None if model.states is None else StateSlots(model.states.nbytes, memory_limit)
        self._completed: dict[tuple[Any, ...], CacheOptions] = {}

    @property
    def groups(self) -> list[DecodeGroup]:
        """All groups so far."""
        return list(self._groups.values())

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of all requests in memory."""
        return 0 if self._slots is None else self._slots.nbytes

    def group(self, requested: CacheOptions) -> DecodeGroup:
        """Return the group of a request.

        Raises:
            OptionError, BudgetError, UnsupportedModelError: as `compress`; or a method that the engine cannot run.
        """
        files = self._files_of(requested)
        requested_key = _key(requested, files)
        with only_listed(files):
            if requested_key not in self._completed:  # it may read a file: not at each request
                if len(self._completed) >= COMPLETED:
                    self._completed.clear()
                self._completed[requested_key] = self.complete(requested)
            completed = self._completed[requested_key]
            codec = "auto" if completed.codec is None else codec_text(completed.codec)
            method = str(completed.method)
            group_key = _key(replace(completed, codec=codec), files)
            if group_key not in self._groups:
                self._forget_idle()
                cache_factory = CacheFactory(
                    self._model,
                    self._pools_of,
                    method,
                    completed.options,
                    completed.budget,
                    codec,
                    self._tokenizer,
                    self._calibration if needs_calibration(codec) else None,
                    self._slots,
                    self._tier,
                    self.reach,
                    self._host_kv,
                    self._step_tokens,
                    self._sampled,
                )
                self._groups[group_key] = DecodeGroup(cache_factory, self._model.layers)
        return self._groups[group_key]

    def _files_of(self, requested: CacheOptions) -> Mapping[str, OptionFile] | None:
        """Return the files that the options of a request may name; None: any file.

        The engine's own options, unchanged, may name any file.
        """
        are_engine_options = requested.method in (None, self.defaults.method) and not requested.options
        return None if are_engine_options else requested.files

    def _forget_idle(self) -> None:
        """Drop idle groups, so that ever new settings do not accumulate."""
        idle = [key for key, group in self._groups.items() if not group.completions]
        for key in idle[: max(0, len(idle) - IDLE)]:
            del self._groups[key]

    def complete(self, requested: CacheOptions) -> CacheOptions:
        """Return the options of a request, with the engine's defaults where it names none.

        The default options belong to the default method; a default budget holds for methods that take one. Where the
        engine was given none, a request that names a method or a budget has plain numbers, unless it names a format.
        """
        defaults = self.defaults
        if requested.preset is not None:
            preset_choice = choose(requested.method, requested.budget, requested.codec, requested.preset)
            requested = replace(
                requested,
                method=preset_choice.method,
                budget=preset_choice.budget,
                codec=preset_choice.codec,
                preset=None,
            )
        if not self._named and (requested.method is not None or requested.budget is not None or requested.options):
            preset_choice = choose(
                requested.method, requested.budget, requested.codec, evicting=bool(requested.options)
            )
            defaults = CacheOptions(
                method=preset_choice.method,
                budget=preset_choice.budget,
                codec=preset_choice.codec,
                max_kl=defaults.max_kl,
            )
        method = defaults.method if requested.method is None else requested.method
        if requested.files is not None:  # it came over a network, where a number is no text
            METHODS.get(str(method)).check(requested.options, typed=True)
        options = {**(defaults.options if method == defaults.method else {}), **requested.options}
        budget = requested.budget
        by_table = is_auto(defaults.budget) and method == defaults.method  # it may choose a format alone
        if budget is None and (by_table or policy_of(str(method), options).takes_budget):
            budget = defaults.budget
        codec = defaults.codec if requested.codec is None else requested.codec
        if self._floor and budget is not None and not is_auto(budget):
            requested_budget = Budget.parse(budget)
            floored = requested_budget.floored(self._floor)
            budget = budget if floored == requested_budget else floored
        if not is_auto(budget):
            check_given(budget, requested.max_kl, None)
            return CacheOptions(method=method, options=options, budget=budget, codec=codec)
        row = self._fitted(
            str(method), options, codec, defaults.max_kl if requested.max_kl is None else requested.max_kl
        )
        return CacheOptions(method=method, options=options, budget=row.budget, codec=row.codec)

    def _fitted(self, method: str, options: Mapping[str, Any], codec: CodecSpec | None, max_kl: float | None) -> FitRow:
        """Return the setting of budget="auto"; a table is read once.

        Raises:
            OptionError: see `millpond.hf.fit.chosen`; or there is no table that can be read; its path is in no message.
        """
        policy_of(method, dict(options))
        model = self._model.model
        if method not in self._fits:
            fit_source = self._fit
            try:
                self._fits[method] = (
                    fit_source if isinstance(fit_source, Fit) else load_fit(fit_source or default_path(model, method))
                )
            except DataError:
                raise OptionError(
                    f"budget='auto': this engine has no table of method {method!r} that it can read; measure one with "
                    "'millpond fit', or give a budget"
                ) from None
        return chosen(model, method, options, codec, max_kl, self._fits[method])

    def _pools_of(self, storage: torch.dtype | Codec, masses: bool, on_host: bool) -> PoolSet:
        whole = self._memory_limit
        limit = whole if not isinstance(whole, TierLimits) else whole.far if on_host else whole.near
        aged = isinstance(storage, Codec) and bool(storage.ages)  # requests may give their tiers any sizes
        key = ("by age" if aged else storage.name if isinstance(storage, Codec) else storage, masses, on_host)
        if aged and key in self._pools:
            return PoolSet(storage, self._page_slots, limit, masses=masses, shared=self._pools[key])
        if key not in self._pools:
            self._pools[key] = PoolSet(
                storage,
                self._page_slots,
                limit,
                masses=masses,
                ropes=ropes_of(storage, ModelProfile.of(self._model.model)),
            )
        return self._pools[key]


def _key(options: CacheOptions, files: Mapping[str, OptionFile] | None) -> tuple[Any, ...]:
    """Return a key of options that is equal where they give the same caches.

    Options of the operator and of a client differ, as do those that may name different files.
    """
    return (
        options.method,
        *sorted((name, type(value).__name__, repr(value)) for name, value in options.options.items()),
        repr(options.budget),
        repr(options.codec),
        repr(options.max_kl),
        options.preset,
        None if files is None else tuple(sorted(files.items())),
    )
