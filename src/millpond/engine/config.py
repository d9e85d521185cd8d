"""Settings of an engine, checked when they are put together."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from os import PathLike
from typing import Any, Literal, TypedDict, TypeVar, get_args

from millpond.budget import Budget, parse_bytes
from millpond.cache.chunks.store import ChunkStore
from millpond.cache.pages.pool import DEFAULT_SLOTS, check_slots
from millpond.cache.paging.choose import rule_named
from millpond.codec import CodecSpec, before_rope, codec_text, codecs_of, resolve
from millpond.engine.request import OnPressure
from millpond.errors import OptionError, unknown
from millpond.hf.calibration.load import CalibrationSource
from millpond.hf.compress import budget_of, policy_of
from millpond.hf.fit import FitSource, check_bound, is_auto
from millpond.methods import METHODS
from millpond.policy.rolling import rolling_policy
from millpond.presets import Choice, choose
from millpond.runner.packed_model import Runner, check_deterministic, check_weights
from millpond.scalar import number

#: Tokens at whose multiples a deterministic engine cuts prompts.
PROMPT_BLOCK = 256
#: What becomes of a text that is longer than the model's context.
Overflow = Literal["refuse", "rolling"]

Call = TypeVar("Call", bound=Callable[..., Any])


class EngineOptions(TypedDict, total=False):
    """The fields of `EngineConfig`, as keyword arguments of `LLM`, `AsyncLLM` and `Engine`."""

    method: str | None
    options: Mapping[str, Any]
    budget: Budget | str | int | float | None
    codec: CodecSpec | None
    calibration: CalibrationSource
    max_kl: float | None
    fit: FitSource
    kv_memory: str | int | None
    max_step_tokens: int
    max_running: int
    overcommit: float
    spread_ages: bool
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
    deterministic: bool
    overflow: Overflow
    on_pressure: OnPressure
    cache_dir: str | PathLike[str] | None
    cache_disk: str | int | None
    trust_remote_code: bool
    max_model_len: int | None
    preset: str | None
    budget_floor: int


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What an engine does with every request that does not say otherwise, and the limits of all of them together.

    Attributes:
        method: of requests that name none; see `compress`. The same holds for options, budget and codec. None: see
            `choice`.
        options: of the method; files that they name are read here.
        budget: entries per KV head, see `compress`.
        codec: number format of the entries, see `compress`.
        calibration: the file that `millpond calibrate` wrote for the model, for the codecs that need one.
        max_kl: of requests with budget="auto" that name none, see `compress`.
        fit: the table of `millpond fit` that these read; None: where it puts those of the model and method.
        kv_memory: limit of all page pools together ("2GiB"), in bytes; None for no limit.
        max_step_tokens: tokens in one forward pass while prompts are read. More read prompts faster; fewer shorten the
            wait of decoding sequences.
        max_running: sequences that decode at a time.
        overcommit: multiple of `kv_memory` that may be reserved. Above 1, requests that use their whole reservation
            cause preemptions.
        spread_ages: reserve for each request what it holds at its age rather than at its end, and begin requests spread
            evenly over the length of an answer while many wait. More run together where caches grow with the answer;
            the schedule "diagonal" of a plan sets it.
        prefix_cache: keep the pages of prompts for later prompts that begin alike, while no request needs the memory;
            the name of the paging rule that says which blocks go first (`list_paging_rules`), or True for "lru".
        pager: file of `millpond train pager` for a rule that predicts, such as "learned"; None: the predictor of the
            package.
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
        deterministic: on one CPU an answer and its log probabilities have the same bits whatever runs with it, however
            steps are filled, whether its beginning is shared or its cache swapped out, and whatever the threads. Needs
            a model that runs without its modules. Prompts are cut at multiples of 256 tokens, of which
            `max_step_tokens` holds one at least, share beginnings in such units, and are read more slowly.
        overflow: what becomes of a text that is longer than the model's context: "refuse" it, or let positions inside
            the cache go on ("rolling"): at the end of the context what is kept moves to its beginning, and the text
            goes on behind it.
        on_pressure: of requests that do not say it, see `Request`: "refuse" those of whose prompts something would be
            evicted, or "evict" as the method does.
        cache_dir: folder for the caches of finished turns, from which later requests whose tokens continue them go on,
            also in another process; made where it does not exist. None: none are stored.
        cache_disk: most bytes of the files in `cache_dir`; those that were unused longest go first. None: 20 GiB.
        trust_remote_code: of a model that is given by name: run the code in its folder, for configuration, tokenizer
            and model; else a folder that brings some is refused.
        max_model_len: most tokens of a prompt and its answer together, where that should be fewer than the model's
            context; None: the context.
        preset: method, budget and codec in one word, in place of the three: see `millpond.preset`.
        budget_floor: tokens that a budget which is a share keeps at least of each prompt, unless it says "at least"
            itself; 0: the share alone.

    Raises:
        OptionError, BudgetError: a value out of range, or a method, option, codec, paging rule or runner that does not
            exist. DataError: a pager that cannot be read.
    """

    method: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    budget: Budget | str | int | float | None = None
    codec: CodecSpec | None = None
    calibration: CalibrationSource = None
    max_kl: float | None = None
    fit: FitSource = None
    kv_memory: str | int | None = None
    max_step_tokens: int = 512
    max_running: int = 256
    overcommit: float = 1.0
    spread_ages: bool = False
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
    deterministic: bool = False
    overflow: Overflow = "refuse"
    on_pressure: OnPressure = "evict"
    cache_dir: str | PathLike[str] | None = None
    cache_disk: str | int | None = None
    trust_remote_code: bool = False
    max_model_len: int | None = None
    preset: str | None = None
    budget_floor: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "page_slots", number(self.page_slots))
        check_slots(self.page_slots)
        if self.kv_memory is not None:
            object.__setattr__(self, "kv_memory", parse_bytes(self.kv_memory))
        if self.cache_disk is not None:
            if self.cache_dir is None:
                raise OptionError(f"cache_disk={self.cache_disk!r} limits the files in cache_dir=; give that too")
            object.__setattr__(self, "cache_disk", parse_bytes(self.cache_disk))
        if self.max_model_len is not None and self.max_model_len < 1:
            raise OptionError(
                f"max_model_len={self.max_model_len} must be at least 1; leave it out for the model's own context"
            )
        if self.budget_floor < 0:
            raise OptionError(f"budget_floor={self.budget_floor} must not be negative; 0 turns it off")
        for name in ("max_step_tokens", "max_running", "overcommit"):
            if not getattr(self, name) >= 1:
                raise OptionError(f"{name}={getattr(self, name)} must be at least 1")
        if self.runner not in get_args(Runner):
            raise unknown("runner", self.runner, get_args(Runner))
        rule_named(self.prefix_cache, self.pager)
        self._check_prefix_disk()
        check_weights(self.weights, self.runner, self.native_layers)
        check_deterministic(self.deterministic, self.runner, self.native_layers)
        self._check_blocks()
        method, budget, codec, _ = self.choice
        object.__setattr__(self, "options", METHODS.get(method).with_files_read(dict(self.options or {})))
        policy = policy_of(method, dict(self.options))
        check_bound(budget, self.max_kl)
        if not is_auto(budget):
            budget_of(method, budget, policy)
        if self.overflow not in get_args(Overflow):
            raise unknown("overflow", self.overflow, get_args(Overflow))
        if self.on_pressure not in get_args(OnPressure):
            raise unknown("on_pressure", self.on_pressure, get_args(OnPressure))
        if self.codec is not None:
            object.__setattr__(self, "codec", codec_text(self.codec))
        codecs = codecs_of(resolve(codec))
        if self.overflow == "rolling":
            codecs = [before_rope(one) for one in codecs]
            policy = rolling_policy(policy, method, bool(codecs))
        for one in codecs:
            policy.check_codec(one)

    @property
    def choice(self) -> Choice:
        """Method, budget and number format of requests that name none: as given, of the preset, or the default, which
        evicts nothing; with a budget, options or texts that go on beyond the context, `h2o`.

        Raises:
            OptionError: a preset together with what it decides.
        """
        evicting = bool(self.options) or self.overflow == "rolling"
        return choose(self.method, self.budget, self.codec, self.preset, evicting)

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

    def _check_blocks(self) -> None:
        if not self.deterministic:
            return
        if self.max_step_tokens < PROMPT_BLOCK:
            raise OptionError(
                f"max_step_tokens={self.max_step_tokens} must be at least {PROMPT_BLOCK} with deterministic=True, "
                "which reads prompts in blocks of as many tokens"
            )
        if self.chunk_store is not None:
            raise OptionError(
                "chunk_store= takes over keys and values that depend on what stood before a chunk when it was read; "
                "leave it out with deterministic=True"
            )
        if self.cache_dir is not None:
            raise OptionError(
                "cache_dir= goes on from decoded tokens, which have other bits than the same tokens in a prompt; leave "
                "it out with deterministic=True"
            )

    def reach(self, context_length: int | None) -> int | None:
        """Positions after which gaps close and a text goes on; None: it ends there.

        Raises:
            OptionError: texts should go on, and the model sets no limit.
        """
        if self.overflow == "refuse":
            return None
        if context_length is None:
            raise OptionError("overflow='rolling': this model sets no limit to a text; leave it out")
        return context_length

    @property
    def prompt_block(self) -> int | None:
        """Tokens at whose multiples alone prompts are cut; None: they are cut anywhere."""
        return PROMPT_BLOCK if self.deterministic else None

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
