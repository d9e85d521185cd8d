"""Settings of an engine and of one request, checked where they come in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from millpond import Budget, BudgetError, OptionError, Policy
from millpond.plugins import brief, make_policy
from millpond_vllm.event_times import CHUNK, NEVER, EventTimes
from millpond_vllm.methods import fitted

#: Key of the settings in `additional_config` of the engine and in `extra_args` of a request.
KEY = "millpond"
#: Settings of a request that HTTP carries as flat keys: "millpond_budget" and so on.
PREFIX = "millpond_"
_MOST = 2**30


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Settings of an engine.

    Attributes:
        method: Name of the method that chooses the kept entries.
        budget: Entries per KV head: "20%" of each prompt or 512 tokens; None keeps everything.
        recent: Newest tokens that never compete; None for what the method protects.
        prefill: "once" evicts at a prompt's end, "chunks" also inside it, "auto" inside it where it is longer than the
            pool of blocks.
        chunk: Tokens between two events inside a prompt; whole blocks are taken.
        force: Run on a version of vLLM that was not tested.
        options: Options of the method.
    """

    method: str = "snapkv"
    budget: str | int | float | None = "20%"
    recent: int | None = None
    prefill: Literal["auto", "once", "chunks"] = "auto"
    chunk: int = CHUNK
    force: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, given: object) -> EngineSettings:
        """Return the settings that a configuration gives.

        Raises:
            OptionError: they are no mapping, or one is unknown or out of range.
            BudgetError: the budget cannot be parsed.
        """
        known = [part.name for part in fields(cls)]
        if not isinstance(given, Mapping):
            raise OptionError(f"millpond: settings {brief(given)} must be a mapping of {', '.join(known)}")
        unknown = [key for key in given if key not in known]
        if unknown:
            raise OptionError(f"millpond: unknown setting {brief(unknown[0])}; there are {', '.join(known)}")
        settings = cls(**given)
        settings.policy()
        parsed_budget(settings.budget)
        if settings.recent is not None:
            _whole("recent", settings.recent)
        _whole("chunk", settings.chunk, 1)
        if settings.prefill not in ("auto", "once", "chunks"):
            raise OptionError(f"millpond: prefill={brief(settings.prefill)} must be 'auto', 'once' or 'chunks'")
        return settings

    def policy(self) -> Policy:
        """Return the policy of the method as it acts on blocks.

        Raises:
            OptionError: no such method or option, or a method that cannot act on blocks.
        """
        if not isinstance(self.method, str) or not isinstance(self.options, Mapping):
            raise OptionError("millpond: method is a name, and options a mapping of its options")
        return fitted(self.method, make_policy(self.method, dict(self.options)))


@dataclass(frozen=True, slots=True)
class RequestSettings:
    """Settings that a request gives for itself; what it leaves out is the engine's.

    Attributes:
        budget: As in `EngineSettings`; None keeps everything.
        recent: Newest tokens that never compete.
        sinks: First positions that stay.
        keep: Spans (begin, end) of positions that stay in every head.
    """

    budget: Budget | Literal["engine"] | None = "engine"
    recent: int | None = None
    sinks: int | None = None
    keep: tuple[tuple[int, int], ...] = ()

    @classmethod
    def parse(cls, extra_args: Mapping[str, Any] | None) -> RequestSettings:
        """Return the settings in a request's `extra_args`: under "millpond", or as keys "millpond_budget" and so on.

        Raises:
            OptionError: one is unknown, out of range, or given twice.
            BudgetError: the budget cannot be parsed.
        """
        given = _gathered(extra_args or {})
        known = ("budget", "recent", "sinks", "keep")
        unknown = [key for key in given if key not in known]
        if unknown:
            raise OptionError(
                f"millpond: unknown setting {brief(unknown[0])} of a request; there are {', '.join(known)}"
            )
        settings = cls(keep=_spans(given.get("keep", ())))
        if "budget" in given:
            settings = replace(settings, budget=parsed_budget(given["budget"]))
        if given.get("recent") is not None:
            settings = replace(settings, recent=_whole("recent", given["recent"]))
        if given.get("sinks") is not None:
            settings = replace(settings, sinks=_whole("sinks", given["sinks"]))
        return settings


def _gathered(extra_args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a request, nested and flat ones together."""
    nested = extra_args.get(KEY, {})
    if not isinstance(nested, Mapping):
        raise OptionError(f"millpond: {KEY}={brief(nested)} must be a mapping such as {{'budget': '30%'}}")
    given: dict[str, Any] = dict(nested)
    for key, value in extra_args.items():
        if isinstance(key, str) and key.startswith(PREFIX):
            name = key.removeprefix(PREFIX)
            if name in given:
                raise OptionError(f"millpond: {name} is given twice, as {key} and in {KEY}; leave one out")
            given[name] = value
    return given


def _spans(given: Any) -> tuple[tuple[int, int], ...]:
    """Return spans from [[begin, end], ...], or from flat numbers [begin, end, begin, end, ...]."""
    if not isinstance(given, list | tuple):
        raise OptionError(f"millpond: keep={brief(given)} must be a list of spans [begin, end]")
    flat: list[Any] = []
    for part in given:
        flat.extend(part) if isinstance(part, list | tuple) else flat.append(part)
    if len(flat) % 2 or len(flat) > 2048:
        raise OptionError(f"millpond: keep has {len(flat)} numbers; it takes pairs, and 1,024 spans at most")
    numbers = [_whole("keep", number) for number in flat]
    spans = tuple(zip(numbers[::2], numbers[1::2], strict=True))
    for begin, end in spans:
        if begin >= end:
            raise OptionError(f"millpond: keep has the span [{begin}, {end}], which is empty; its end lies behind it")
    return spans


def _whole(name: str, value: Any, least: int = 0) -> int:
    """Return a whole number that was checked."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # what JSON may make of it
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _MOST:
        raise OptionError(f"millpond: {name}={brief(value)} must be a whole number, {least} to {_MOST}")
    return value


def parsed_budget(given: Any) -> Budget | None:
    """Return a budget in tokens or as a share; None keeps everything.

    Raises:
        BudgetError: it cannot be parsed, or is in bytes.
    """
    if given is None or (isinstance(given, str) and given.strip().lower() == "none"):
        return None
    budget = Budget.parse(given)
    if budget.kind == "bytes":
        raise BudgetError(
            f"millpond: budget {brief(given)}: vLLM sizes the pool; give a share of each prompt or tokens"
        )
    return budget


@dataclass(frozen=True, slots=True)
class BlockRules:
    """How an engine's settings become the events of a request.

    Attributes:
        settings: Settings of the engine.
        policy: Policy of its method.
        block: Tokens of a block.
        pool: Blocks of the pool that requests can use; None if it is not known yet.
    """

    settings: EngineSettings
    policy: Policy
    block: int
    pool: int | None = None

    def check(self) -> None:
        """Refuse an engine whose budget in tokens leaves no block.

        Raises:
            BudgetError: the budget leaves no block.
        """
        budget = parsed_budget(self.settings.budget)
        if budget is not None and budget.kind == "tokens":
            self._packed(budget, NEVER >> 1, self._recent(budget, NEVER >> 1, RequestSettings()))

    def times(self, prompt: int, request: RequestSettings) -> EventTimes:
        """Return the events of a request of `prompt` tokens.

        Raises:
            BudgetError: its budget leaves no block.
        """
        budget = parsed_budget(self.settings.budget) if request.budget == "engine" else request.budget
        if budget is None or self.policy.keeps_all:
            return EventTimes(prompt, self.block, NEVER, 0)
        recent = self._recent(budget, prompt, request)
        packed = self._packed(budget, prompt, recent)
        kept = sum(end - begin for begin, end in request.keep)
        if kept:  # what must stay has room besides the sinks and one block that competes
            sinks = self.policy.protect.sinks if request.sinks is None else request.sinks
            packed = max(packed, -(-(min(kept, prompt) + sinks) // self.block) + 1)
        times = EventTimes(prompt, self.block, packed, recent, 0, self.policy.every_step)
        stride = max(1, self.settings.chunk // self.block)
        return replace(times, stride=stride) if self._inside(times) else times

    def _inside(self, times: EventTimes) -> bool:
        """Whether a request evicts inside its prompt."""
        if self.settings.prefill == "auto":
            return self.pool is not None and -(-times.prompt // times.block) + 1 > self.pool
        return self.settings.prefill == "chunks"

    def _recent(self, budget: Budget, prompt: int, request: RequestSettings) -> int:
        """Return the newest tokens that never compete."""
        given = request.recent if request.recent is not None else self.settings.recent
        if given is not None:
            return max(given, self.policy.window)
        share = self.policy.protect.newest(budget.entries(prompt))
        return max(share, self.policy.window)

    def _packed(self, budget: Budget, prompt: int, recent: int) -> int:
        """Return the blocks that kept entries fill; a share of a prompt fills one at least."""
        entries = budget.entries(prompt)
        packed = (entries - recent) // self.block
        if packed >= 1 or budget.kind == "ratio":
            return max(1, packed)
        raise BudgetError(
            f"budget {entries} leaves no block of {self.block} tokens beside the newest {recent}; give at least "
            f"{recent + self.block}, a smaller recent, or start vLLM with a smaller --block-size"
        )
