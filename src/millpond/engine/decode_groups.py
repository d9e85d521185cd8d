"""The decode groups of an engine, by cache options, and the pools that they share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from millpond.budget import Budget
from millpond.cache.pages.memory_limit import MemoryLimit
from millpond.cache.pages.pool_set import PoolSet
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
#: Ways of asking whose meaning is kept.
COMPLETED = 256


class DecodeGroups:
    """Makes groups when a request first asks for one, and keeps them.

    Args:
        defaults: what holds where a request says nothing. memory_limit: what all pools share.
        calibration: of the model, for the codecs that need one. tier: of KV on a disk; None: all is in memory.
        fit: the table of requests with budget="auto"; None: that of the user's cache folder.
        named: whether a method, budget or format was given for the engine.
        floor: least tokens of a share, see `EngineConfig`.

    Attributes:
        reach: positions after which gaps close and a text goes on; None: it ends there.
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
    ) -> None:
        self.reach, self._named, self._floor = reach, named, floor
        self.defaults = defaults
        self._model = model
        self._memory_limit = memory_limit
        self._page_slots = page_slots
        self._tokenizer = tokenizer
        self._calibration, self._tier = calibration, tier
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

    def group(self, asked: CacheOptions) -> DecodeGroup:
        """The group of a request.

        Raises:
            OptionError, BudgetError, UnsupportedModelError: as `compress`; or a method that the engine cannot run.
        """
        files = self._files_of(asked)
        wanted = _key(asked, files)
        with only_listed(files):
            if wanted not in self._completed:  # it may read a file: not at each request
                if len(self._completed) >= COMPLETED:
                    self._completed.clear()
                self._completed[wanted] = self.complete(asked)
            chosen = self._completed[wanted]
            codec = "auto" if chosen.codec is None else codec_text(chosen.codec)
            method = str(chosen.method)
            key = _key(replace(chosen, codec=codec), files)
            if key not in self._groups:
                self._forget_idle()
                cache_factory = CacheFactory(
                    self._model,
                    self._pools_of,
                    method,
                    chosen.options,
                    chosen.budget,
                    codec,
                    self._tokenizer,
                    self._calibration if needs_calibration(codec) else None,
                    self._slots,
                    self._tier,
                    self.reach,
                )
                self._groups[key] = DecodeGroup(cache_factory, self._model.layers)
        return self._groups[key]

    def _files_of(self, asked: CacheOptions) -> Mapping[str, OptionFile] | None:
        """What the options of a request may name; the engine's own options, as they are, may name any file."""
        own = asked.method in (None, self.defaults.method) and not asked.options
        return None if own else asked.files

    def _forget_idle(self) -> None:
        """Drop idle groups, so that ever new settings do not pile up."""
        idle = [key for key, group in self._groups.items() if not group.completions]
        for key in idle[: max(0, len(idle) - IDLE)]:
            del self._groups[key]

    def complete(self, asked: CacheOptions) -> CacheOptions:
        """What a request asks for, with the engine's defaults where it says nothing.

        The default options belong to the default method; a default budget holds for methods that take one. Where the
        engine was given none, a request that names a method or a budget has plain numbers, unless it names a format.
        """
        usual = self.defaults
        if asked.preset is not None:
            picked = choose(asked.method, asked.budget, asked.codec, asked.preset)
            asked = replace(asked, method=picked.method, budget=picked.budget, codec=picked.codec, preset=None)
        if not self._named and (asked.method is not None or asked.budget is not None or asked.options):
            picked = choose(asked.method, asked.budget, asked.codec, evicting=bool(asked.options))
            usual = CacheOptions(method=picked.method, budget=picked.budget, codec=picked.codec, max_kl=usual.max_kl)
        method = usual.method if asked.method is None else asked.method
        if asked.files is not None:  # it came over a network, where a number is no text
            METHODS.get(str(method)).check(asked.options, typed=True)
        options = {**(usual.options if method == usual.method else {}), **asked.options}
        budget = asked.budget
        by_table = is_auto(usual.budget) and method == usual.method  # it may choose a format alone
        if budget is None and (by_table or policy_of(str(method), options).takes_budget):
            budget = usual.budget
        codec = usual.codec if asked.codec is None else asked.codec
        if self._floor and budget is not None and not is_auto(budget):
            given = Budget.parse(budget)
            floored = given.floored(self._floor)
            budget = budget if floored == given else floored
        if not is_auto(budget):
            check_given(budget, asked.max_kl, None)
            return CacheOptions(method=method, options=options, budget=budget, codec=codec)
        row = self._fitted(str(method), options, codec, usual.max_kl if asked.max_kl is None else asked.max_kl)
        return CacheOptions(method=method, options=options, budget=row.budget, codec=row.codec)

    def _fitted(self, method: str, options: Mapping[str, Any], codec: CodecSpec | None, max_kl: float | None) -> FitRow:
        """The setting of budget="auto"; a table is read once.

        Raises:
            OptionError: see `millpond.hf.fit.chosen`; or there is no table that can be read; its path is in no message.
        """
        policy_of(method, dict(options))
        model = self._model.model
        if method not in self._fits:
            given = self._fit
            try:
                self._fits[method] = given if isinstance(given, Fit) else load_fit(given or default_path(model, method))
            except DataError:
                raise OptionError(
                    f"budget='auto': this engine has no table of method {method!r} that it can read; measure one with "
                    "'millpond fit', or give a budget"
                ) from None
        return chosen(model, method, options, codec, max_kl, self._fits[method])

    def _pools_of(self, storage: torch.dtype | Codec, masses: bool) -> PoolSet:
        aged = isinstance(storage, Codec) and bool(storage.ages)  # requests may give their tiers any sizes
        key = ("by age" if aged else storage.name if isinstance(storage, Codec) else storage, masses)
        if aged and key in self._pools:
            return PoolSet(storage, self._page_slots, self._memory_limit, masses=masses, shared=self._pools[key])
        if key not in self._pools:
            self._pools[key] = PoolSet(
                storage,
                self._page_slots,
                self._memory_limit,
                masses=masses,
                ropes=ropes_of(storage, ModelProfile.of(self._model.model)),
            )
        return self._pools[key]


def _key(wanted: CacheOptions, files: Mapping[str, OptionFile] | None) -> tuple[Any, ...]:
    """Equal where the same is wanted, by the same one of operator and client, and the same files may be named."""
    return (
        wanted.method,
        *sorted((name, type(value).__name__, repr(value)) for name, value in wanted.options.items()),
        repr(wanted.budget),
        repr(wanted.codec),
        repr(wanted.max_kl),
        wanted.preset,
        None if files is None else tuple(sorted(files.items())),
    )
