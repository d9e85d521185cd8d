"""Settings of an engine, checked when they are put together."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from os import PathLike
from typing import Any, TypedDict, TypeVar, get_args

from millpond.budget import Budget, parse_bytes
from millpond.cache.chunks.store import ChunkStore
from millpond.cache.pages.pool import DEFAULT_SLOTS, check_slots
from millpond.cache.paging.choose import rule_named
from millpond.codec import CodecSpec, codec_text, codecs_of, resolve
from millpond.errors import OptionError, unknown
from millpond.hf.calibration.load import CalibrationSource
from millpond.hf.compress import budget_of, policy_of
from millpond.methods import METHODS
from millpond.runner.packed_model import Runner, check_weights
from millpond.scalar import number

Call = TypeVar("Call", bound=Callable[..., Any])


class EngineOptions(TypedDict, total=False):
    """The fields of `EngineConfig`, as keyword arguments of `LLM`, `AsyncLLM` and `Engine`."""

    method: str
    options: Mapping[str, Any]
    budget: Budget | str | int | float | None
    codec: CodecSpec | None
    calibration: CalibrationSource
    kv_memory: str | int | None
    max_step_tokens: int
    max_running: int
    overcommit: float
    prefix_cache: bool | str
    pager: str | PathLike[str] | None
    prefix_disk: str | int | None
    prefix_folder: str | PathLike[str] | None
    swap_to: str | PathLike[str] | None
    page_slots: int
    runner: Runner
    native_layers: bool
    weights: str | None
    chunk_store: ChunkStore | None


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What an engine does with every request that does not say otherwise, and the limits of all of them together.

    Attributes:
        method: of requests that name none; see `compress`. The same holds for options, budget and codec.
        options: of the method; files that they name are read here.
        budget: entries per KV head, see `compress`.
        codec: number format of the entries, see `compress`.
        calibration: the file that `millpond calibrate` wrote for the model, for the codecs that need one.
        kv_memory: limit of all page pools together ("2GiB"), in bytes; None for no limit.
        max_step_tokens: tokens in one forward pass while prompts are read. More read prompts faster; fewer shorten the
            wait of decoding sequences.
        max_running: sequences that decode at a time.
        overcommit: multiple of `kv_memory` that may be reserved. Above 1, requests that use their whole reservation
            cause preemptions.
        prefix_cache: keep the pages of prompts for later prompts that begin alike, while no request needs the memory;
            the name of the paging rule that says which blocks go first (`list_paging_rules`), or True for "lru".
        pager: file of `millpond train pager` for a rule that predicts ("learned", "mark0", "mark_predict"); None: the
            predictor of the package.
        prefix_disk: most bytes ("2GiB") of a disk for blocks of the prefix cache that leave the memory, and come back
            when a prompt begins with them; None: they are forgotten.
        prefix_folder: where these lie, in a file without a name; None: the system's folder for temporary files.
        swap_to: folder for the caches of preempted requests; None keeps them in the host's memory.
        page_slots: entries per page, a power of two.
        runner: "lean" runs the model's weights without its modules, "modules" runs its modules, "auto" is "lean"
            where both give the same.
        native_layers: as in `compress`.
        weights: "int8" or "int4": the matrices of the model's layers and head are packed in 8 or 4 bits when the
            engine is made (on a CPU, of models that run natively); None leaves them as they are. The modules of the
            model are emptied then, so `LLM` takes this only for a model that it loads.
        chunk_store: keys and values of chunks that prompts hold, see `Prompt`; None: prompts hold none.

    Raises:
        OptionError, BudgetError: a value out of range, or a method, option, codec, paging rule or runner that does not
            exist. DataError: a pager that cannot be read.
    """

    method: str = "h2o"
    options: Mapping[str, Any] = field(default_factory=dict)
    budget: Budget | str | int | float | None = None
    codec: CodecSpec | None = None
    calibration: CalibrationSource = None
    kv_memory: str | int | None = None
    max_step_tokens: int = 512
    max_running: int = 256
    overcommit: float = 1.0
    prefix_cache: bool | str = False
    pager: str | PathLike[str] | None = None
    prefix_disk: str | int | None = None
    prefix_folder: str | PathLike[str] | None = None
    swap_to: str | PathLike[str] | None = None
    page_slots: int = DEFAULT_SLOTS
    runner: Runner = "auto"
    native_layers: bool = True
    weights: str | None = None
    chunk_store: ChunkStore | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "page_slots", number(self.page_slots))
        check_slots(self.page_slots)
        if self.kv_memory is not None:
            object.__setattr__(self, "kv_memory", parse_bytes(self.kv_memory))
        for name in ("max_step_tokens", "max_running", "overcommit"):
            if not getattr(self, name) >= 1:
                raise OptionError(f"{name}={getattr(self, name)} must be at least 1")
        if self.runner not in get_args(Runner):
            raise unknown("runner", self.runner, get_args(Runner))
        rule_named(self.prefix_cache, self.pager)
        self._check_prefix_disk()
        check_weights(self.weights, self.runner, self.native_layers)
        object.__setattr__(self, "options", METHODS.get(self.method).with_files_read(dict(self.options or {})))
        policy = policy_of(self.method, dict(self.options))
        budget_of(self.method, self.budget, policy)
        if self.codec is not None:
            object.__setattr__(self, "codec", codec_text(self.codec))
            for one in codecs_of(resolve(self.codec)):
                policy.check_codec(one)

    def _check_prefix_disk(self) -> None:
        """
        Raises:
            OptionError, BudgetError: a disk for a prefix cache that there is not, or a size that is none.
        """
        if self.prefix_disk is None:
            if self.prefix_folder is not None:
                raise OptionError("prefix_folder= is where prefix_disk= lies; give its size, such as '2GiB', too")
            return
        if not self.prefix_cache:
            raise OptionError(f"prefix_disk={self.prefix_disk!r} is for a prefix cache; give prefix_cache=True, too")
        object.__setattr__(self, "prefix_disk", parse_bytes(self.prefix_disk))

    @classmethod
    def of(cls, config: EngineConfig | None, options: EngineOptions) -> EngineConfig:
        """`config`, or the defaults where it is None, with `options` in place of its own values.

        Raises:
            OptionError, BudgetError: as of the class. TypeError: a name that is no field.
        """
        return cls(**options) if config is None else replace(config, **options) if options else config

    @property
    def kv_limit(self) -> int | None:
        """`kv_memory` in bytes."""
        return None if self.kv_memory is None else parse_bytes(self.kv_memory)


def takes_engine_options(call: Call) -> Call:
    """Show `**options` of a constructor as the fields of `EngineConfig`, for `help` and for completion."""
    shown = inspect.signature(call)
    named = [one for one in shown.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
    options = [
        inspect.Parameter(
            one.name,
            inspect.Parameter.KEYWORD_ONLY,
            default={} if one.name == "options" else one.default,
            annotation=one.type,
        )
        for one in fields(EngineConfig)
    ]
    call.__signature__ = shown.replace(parameters=[*named, *options])  # type: ignore[attr-defined]
    return call
