"""Planning: the fastest plan of a model for a workload with a memory limit, and what would help."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from millpond.budget import Budget, parse_bytes
from millpond.cache.paging.choose import keeps_prompts
from millpond.codec import CodecSpec
from millpond.engine.config import EngineConfig
from millpond.engine.offload.cost import CostModel
from millpond.engine.offload.kv_size import KVSize, kv_size, planned
from millpond.engine.offload.machine import WEIGHTS, CallTimes, MachineConstants
from millpond.engine.offload.machine_file import machine_constants
from millpond.engine.offload.model_size import ModelSize, model_size
from millpond.engine.offload.plan import DISK, ENGINE, HOST, Capabilities, Plan
from millpond.engine.offload.search import Limits, check_memory, min_memory, search
from millpond.errors import BudgetError, MillpondError, OptionError
from millpond.models.cache_folder import check_folder
from millpond.models.weights.packed_file import Report
from millpond.runner.packed_model import check_format


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Tokens of each prompt and each answer.

    Attributes:
        prompt: Tokens of each prompt.
        new: Tokens of each answer.

    Raises:
        OptionError: a number that is not whole, or below 1.
    """

    prompt: int = 512
    new: int = 128

    def __post_init__(self) -> None:
        for name, value in (("prompt_tokens", self.prompt), ("new_tokens", self.new)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise OptionError(f"{name}={value!r} must be a whole number of at least 1")

    def check_context(self, context: int | None) -> None:
        """Check that prompt and answer fit the model's context; None: any do.

        Raises:
            OptionError: they are longer.
        """
        if context is not None and self.prompt + self.new > context:
            raise OptionError(
                f"prompt_tokens={self.prompt} and new_tokens={self.new} are more than the model's context of "
                f"{context} tokens; shorten one of them"
            )

    def __str__(self) -> str:
        return f"{self.prompt} + {self.new} tokens"


def usual_workloads(context: int | None) -> Iterator[Workload]:
    """Yield workloads to plan for by default: 512 + 128 tokens, then shorter ones to 96 + 32.

    Example:
        >>> [str(workload) for workload in usual_workloads(400)]
        ['256 + 64 tokens', '128 + 32 tokens', '96 + 32 tokens']
    """
    for prompt, new in ((512, 128), (256, 64), (128, 32), (96, 32)):
        if context is None or prompt + new <= context or (prompt, new) == (96, 32):
            yield Workload(prompt=prompt, new=new)


def plan(
    model: str | os.PathLike[str],
    *,
    memory: str | int,
    prompt_tokens: int,
    new_tokens: int,
    disk: str | os.PathLike[str] | None = None,
    method: str | None = None,
    options: Mapping[str, Any] | None = None,
    budget: Budget | str | int | float | None = None,
    codec: CodecSpec = "auto",
    weights: str | None = None,
    latency_s: float | None = None,
    machine: MachineConstants | None = None,
    measure: bool = False,
    report: Report | None = None,
    capabilities: Capabilities = ENGINE,
) -> Plan:
    """Plan how a model runs inside a memory limit.

    The plan says which weights and KV are on which tier, how many sequences run at a time, and how fast. It needs the
    model's config.json and safetensors headers; no weight is loaded. The speed is a prediction from a cost
    model with constants of this machine.

    Args:
        model: A folder, a GGUF file or a name of `millpond models`.
        memory: Limit of the host for weights, KV and buffers together: "1GiB", or bytes.
        prompt_tokens: Tokens of each prompt.
        new_tokens: Tokens of each answer.
        disk: A folder on the disk that weights may stay on; None: everything must fit in memory.
        method: Method of the KV cache, see `compress`.
        options: Options of the method.
        budget: Entries that are kept, see `compress`.
        codec: Number format of the entries, see `compress`.
        weights: "int8" or "int4", matrices that are packed in a file in `disk`; None: as they were saved.
        latency_s: Most seconds from the first prompt to the last token of a block; None: any.
        machine: Its constants; None: measured once for the folder, in about 30 s, and kept in the user's cache folder.
        measure: Measure even where constants are kept.
        report: Called with what is being measured and the share done.
        capabilities: Placements and schedules that may be chosen.

    Raises:
        BudgetError: nothing fits the memory, with the least that does, or meets the latency.
        OptionError: a folder that is not there, or a value out of range.
        DataError, UnsupportedModelError: see `model_size`.

    Example:
        >>> found = plan("pond-recall", memory="64MiB", prompt_tokens=256, new_tokens=64, machine=EXAMPLE)
        >>> found.weights
        {'host': 1.0}
    """
    limits = Limits(memory=parse_bytes(memory), latency_s=_positive(latency_s))
    load = Workload(prompt=prompt_tokens, new=new_tokens)
    check_format(weights)
    if disk is not None:
        check_folder(Path(disk))
    size = model_size(model, weights)
    load.check_context(size.context)

    def kv(memory: int, codec: CodecSpec = codec) -> KVSize:
        return kv_size(
            size, prompt_tokens, new_tokens, method=method, options=options, budget=budget, codec=codec, memory=memory
        )

    allowed = capabilities
    if disk is None:
        allowed = replace(allowed, weights=_without(allowed.weights), kv=_without(allowed.kv))
    kv_of_sequence = kv_that_fits(
        size, kv, limits, allowed
    )  # before anything is measured: what it refuses is refused at once
    if machine is None:
        machine = constants_for(size.folder, None if disk is None else Path(disk), again=measure, report=report)
    cost = CostModel(size, kv_of_sequence, machine)
    best_plan = search(cost, limits, allowed)
    assert best_plan.prediction is not None, "a plan that was searched for"
    changes = _changes(cost, limits, allowed, lambda: kv(limits.memory, "int4"), codec)
    return replace(best_plan, prediction=replace(best_plan.prediction, what_if=changes))


def kv_that_fits(
    size: ModelSize, kv: Callable[[int], KVSize], limits: Limits, capabilities: Capabilities = ENGINE
) -> KVSize:
    """Return the cache of a sequence where one fits.

    Args:
        size: Sizes of the model.
        kv: Returns the cache where pools share a number of bytes; with more they take memory in larger grains.
        limits: Limits of the plan.
        capabilities: Placements that may be used.

    Raises:
        BudgetError: less memory than the smallest that runs, with a number that does.
    """
    memory = limits.memory
    while True:
        cost = CostModel(size, kv(memory), EXAMPLE)  # which no constant of the machine changes
        min_bytes = min_memory(cost, capabilities, limits.rows[0])
        if min_bytes <= memory:
            check_memory(cost, limits, capabilities)
            return cost.kv
        memory = min_bytes


def constants_for(
    model: Path, disk: Path | None, *, again: bool = False, report: Report | None = None
) -> MachineConstants:
    """Return the constants of this machine for a folder `disk`, or for the model's own files.

    Raises:
        OptionError: see `measure`.
    """
    if disk is not None:
        return machine_constants(disk, again=again, report=report)
    files = sorted(model.glob("*.safetensors"), key=lambda file: file.stat().st_size)
    return machine_constants(model, again=again, report=report, file=files[-1])


def _changes(
    cost: CostModel, limits: Limits, capabilities: Capabilities, int4: Callable[[], KVSize], codec: object
) -> dict[str, float]:
    """Return tokens per second of the best plan after each change that can be made."""
    machine, faster = cost.machine, {}

    def try_change(name: str, cost: CostModel, limits: Limits) -> None:
        try:
            prediction = search(cost, limits, capabilities).prediction
        except MillpondError:
            return
        assert prediction is not None, "a plan that was searched for"
        faster[name] = prediction.tokens_per_s

    if DISK in capabilities.weights:
        double = replace(machine, read_per_s=2 * machine.read_per_s, write_per_s=2 * machine.write_per_s)
        try_change("twice the disk bandwidth", replace(cost, machine=double), limits)
    try_change("twice the memory", cost, replace(limits, memory=2 * limits.memory))
    if codec != "int4":
        try:
            smaller = int4()
        except MillpondError:  # a method or a head_dim that codes do not go with
            return faster
        try_change("an int4 cache", replace(cost, kv=smaller), limits)
    return faster


def _without(tiers: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(tier for tier in tiers if tier != DISK) or (HOST,)


def _positive(latency_s: float | None) -> float | None:
    if latency_s is not None and not latency_s > 0:
        raise OptionError(f"latency_s={latency_s!r} must be more than 0 seconds")
    return latency_s


#: Round figures of a small machine, for examples: 1 GB/s, 10 GB/s, 20 to 100 GFLOP/s.
EXAMPLE = MachineConstants(
    read_per_s=1e9,
    write_per_s=1e9,
    burst_per_s=1e9,
    memory_per_s=1e10,
    attention=5e10,
    read_cpu_s=1e-10,
    flops={name: {1: 2e10, 16: 5e10, 1024: 1e11} for name in WEIGHTS},
    calls=CallTimes(step_s=2e-3, layer_s=2e-4, sequence_s=2e-5, piece_s=1e-3, prompt_s=1e-3),
    disk_calls=CallTimes(step_s=0.0, layer_s=5e-3, sequence_s=0.0, piece_s=5e-3, prompt_s=5e-3),
)


def fastest_plan(
    size: ModelSize,
    config: EngineConfig,
    memory: int,
    disk: Path | None,
    machine: MachineConstants | None,
    workload: Workload | None,
    report: Report | None = None,
    *,
    capabilities: Capabilities = ENGINE,
    verified: bool = False,
) -> tuple[Plan, Workload]:
    """Return the fastest plan inside `memory` bytes, and the workload that it was made for.

    Layers that do not stay are read from the model's own folder, so it needs no `disk`; KV goes to a disk only with
    one. Sequences, prompt tokens of a sweep and KV are at most those of `config`.

    Args:
        size: Sizes of the model.
        config: Settings of the engine.
        memory: Bytes of the host.
        disk: Folder for KV; None: KV stays in memory.
        machine: Constants; None: measured once and kept.
        workload: Workload to plan for; None for the longest of `usual_workloads` that fits.
        report: Called with the progress of measuring.
        capabilities: Placements and schedules that the plan may use.
        verified: All that is read is compared with its checksum, so embeddings and head, of which parts are read, stay
            in memory.

    Raises:
        BudgetError: less memory than the smallest that runs.
        OptionError: a workload beyond the model's context, or the machine cannot be measured.
    """
    limits = Limits(memory=memory, sequences=config.max_running, prompt_rows=config.max_step_tokens, kv=config.kv_limit)
    capabilities = _within(
        capabilities, None if keeps_prompts(config.prefix_cache) else disk
    )  # the prefix cache holds pages in memory
    if verified:
        capabilities = replace(capabilities, ends=("host",))
    if workload is not None:
        workload.check_context(size.context)
        kv = _kv_that_fits(size, config, workload, limits, capabilities)
    else:
        workload, kv = _longest(size, config, limits, capabilities)
    if machine is None:
        machine = constants_for(size.folder, disk, report=report)
    return search(CostModel(size, kv, machine), limits, capabilities), workload


def _longest(
    size: ModelSize, config: EngineConfig, limits: Limits, capabilities: Capabilities
) -> tuple[Workload, KVSize]:
    """Return the longest usual workload that fits, and its KV.

    Raises:
        BudgetError: none fits.
    """
    for workload in usual_workloads(size.context):
        try:
            return workload, _kv_that_fits(size, config, workload, limits, capabilities)
        except BudgetError as error:
            refused = error
    raise refused


def _kv_that_fits(
    size: ModelSize, config: EngineConfig, workload: Workload, limits: Limits, capabilities: Capabilities
) -> KVSize:
    """Return the cache of a sequence.

    Raises:
        BudgetError: less memory than the smallest that runs.
    """
    cache_options = planned(config)

    def kv(memory: int) -> KVSize:
        return kv_size(size, workload.prompt, workload.new, **cache_options, memory=memory)

    return kv_that_fits(size, kv, limits, capabilities)


def _within(capabilities: Capabilities, disk: Path | None) -> Capabilities:
    """Return the part of the capabilities that can be used.

    KV stays in memory without a folder for it, or without the program for its share.
    """
    if disk is not None and find_spec("scipy") is not None:
        return capabilities
    return replace(capabilities, kv=tuple(tier for tier in capabilities.kv if tier == HOST))
