"""A model opened inside the memory of an accelerator: which layers stay there; others are copied in each step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any

import torch

from millpond.budget import parse_bytes
from millpond.engine.config import EngineConfig
from millpond.engine.offload.cost import StepMemory
from millpond.engine.offload.kv_size import KVSize, kv_size, planned
from millpond.engine.offload.model_size import ModelSize, fingerprint, size_of
from millpond.engine.offload.open import Opened, Placement, check_dtype, folder_of, kv_of
from millpond.engine.offload.plan import DEVICE, DISK, HOST, SLOTS, Capabilities, Plan, spread
from millpond.engine.offload.planner import Workload, usual
from millpond.errors import BudgetError, OptionError
from millpond.models.weights.sizes import WeightSizes
from millpond.models.weights.skeleton import Skeleton
from millpond.models.weights.streamed import StreamedLayers
from millpond.tiers.cuda import Bandwidths, CudaDevice
from millpond.tiers.ledger import Ledger, Tier

#: Bytes per second that a disk is taken to read where nothing was measured.
DISK_BYTES_PER_S = 1e9


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """A plan for a device, and what was found.

    Attributes:
        sequences: that run together. sweep_s: of a decoding step, predicted. tokens_per_s: while all decode.
    """

    plan: Plan
    workload: Workload
    sequences: int
    sweep_s: float

    @property
    def tokens_per_s(self) -> float:
        return self.sequences / self.sweep_s

    def __str__(self) -> str:
        shown = ", ".join(f"{share:.0%} {tier}" for tier, share in self.plan.weights.items())
        return (
            f"layers: {shown}; at most {self.sequences} sequences of {self.workload}, a step in "
            f"{self.sweep_s * 1e3:.0f} ms if its reads are all it waits for: {self.tokens_per_s:.1f} tokens per second "
            "while all decode"
        )


def device_plan(
    size: ModelSize,
    config: EngineConfig,
    device_memory: int,
    memory: int | None,
    speed: Bandwidths,
    workload: Workload | None = None,
) -> DevicePlan:
    """The plan with the most tokens per second of a model whose KV lies on the device.

    A layer that stays there is not copied in each step, and leaves less memory for KV, thus for sequences that share
    the copies. All numbers of layers are compared. What the host's memory does not hold is read from the disk.

    Args:
        device_memory: bytes of the device. memory: of the host that weights may take; None: no limit. workload: texts
            that it is made for; None: the longest of `usual` of which one sequence fits.

    Raises:
        BudgetError: not one sequence fits. OptionError: a workload beyond the model's context.
    """
    step = StepMemory.of(size, step_tokens=config.max_step_tokens, running=config.max_running)
    for one in [workload] if workload is not None else usual(size.context):
        one.check_context(size.context)
        kv = kv_size(size, one.prompt, one.new, **planned(config), memory=device_memory)
        found = [
            plan
            for n in range(len(size.layers) + 1)
            if (plan := _with_layers(n, size, config, step, kv, device_memory, memory, speed, one)) is not None
        ]
        if found:
            return max(found, key=lambda plan: plan.tokens_per_s)
    least = size.end_bytes + min(SLOTS, len(size.layers)) * size.slot_bytes + step.nbytes + kv.most
    raise BudgetError(
        f"device_memory={device_memory:,} bytes is less than the smallest that runs {one}, {least:,} (embeddings and "
        f"head {size.end_bytes:,}, slots for layers, a step {step.nbytes:,}, KV {kv.most:,}); raise it, or lower "
        f"max_step_tokens ({config.max_step_tokens}) or max_running ({config.max_running})"
    )


def _with_layers(
    n: int,
    size: ModelSize,
    config: EngineConfig,
    step: StepMemory,
    kv: KVSize,
    device_memory: int,
    memory: int | None,
    speed: Bandwidths,
    workload: Workload,
) -> DevicePlan | None:
    """The plan with `n` layers on the device; None where no sequence fits there."""
    every = len(size.layers)
    on_device = set(spread(n, every))
    away = [layer.n_bytes for index, layer in enumerate(size.layers) if index not in on_device]
    slots = min(SLOTS, len(away)) * size.slot_bytes
    free = device_memory - size.end_bytes - (size.layer_bytes - sum(away)) - slots - step.nbytes
    if config.kv_limit is not None:
        free = min(free, config.kv_limit)
    reading = max(kv.most - kv.held, 0)  # one prompt is read while the others decode
    sequences = min(config.max_running, (free - reading) // max(kv.held, 1))
    if free < kv.most or sequences < 1:
        return None
    held, in_host = 0, 0
    for nbytes in away:
        if memory is not None and held + nbytes > memory:
            break
        held, in_host = held + nbytes, in_host + 1
    on_disk = len(away) - in_host
    copied = sum(away)
    read = copied - held
    seconds = max(
        copied / speed.link, read / DISK_BYTES_PER_S, (size.n_bytes + sequences * kv.step_bytes) / speed.memory
    )
    plan = Plan(
        weights={DEVICE: n / every, HOST: in_host / every, DISK: on_disk / every}, prompt_rows=config.max_step_tokens
    )
    return DevicePlan(plan, workload, sequences, seconds)


#: What an engine runs there. KV lies on the device, which a plan calls "host", as where nothing is said.
ON_DEVICE = Capabilities(weights=(DEVICE, HOST, DISK), kv=(HOST,), ends=("host",))


def open_on_device(
    name: str | PathLike[str],
    where: torch.device,
    device_memory: str | int | None,
    memory: str | int | None,
    plan: Plan | None,
    dtype: str | None,
    config: EngineConfig,
    *,
    workload: Workload | None = None,
    device: CudaDevice | None = None,
    **streaming: Any,
) -> Opened:
    """Open the model in a folder so that weights, KV and the buffers of a step take at most `device_memory` there.

    Args:
        where: the GPU. device_memory: "16GiB" or bytes; None: no limit, which a plan needs. memory: of the host that
            weights may take; None: no limit. plan: None for one that is made here. device: that is used; None: made
            here. streaming: of `StreamedLayers`.

    Raises:
        BudgetError: less memory than the smallest that runs. OptionError: no folder of safetensors, another dtype than
            the saved one, weights in codes, or a plan that a device does not run. DataError, UnsupportedModelError: as
            `Skeleton.of`.
    """
    if config.weights is not None:
        raise OptionError(f"weights={config.weights!r}: products with codes run on a CPU; leave it or device out")
    folder = folder_of(name, dtype)
    skeleton = Skeleton.of(folder)
    check_dtype(dtype, skeleton)
    capacity = None if device_memory is None else parse_bytes(device_memory)
    limit = None if memory is None else parse_bytes(memory)
    device = device or CudaDevice(where, capacity)
    size, found = size_of(folder, skeleton), None
    if plan is None:
        assert capacity is not None, "checked by those who ask for it"
        found = device_plan(size, config, capacity, limit, device.measure(), workload)
        plan = found.plan
    else:
        ON_DEVICE.check(plan)
        if plan.model:
            plan.check_model(fingerprint(skeleton))
    config = replace(config, max_step_tokens=plan.prompt_rows)
    n, step = len(size.layers), StepMemory.of(size, step_tokens=plan.prompt_rows, running=config.max_running)
    on_device, on_disk = plan.device_layers(n), plan.streamed_layers(n)
    kept = [index for index in range(n) if index not in {*on_device, *on_disk}]
    ledger = Ledger([Tier(HOST, "host", limit), Tier(DISK, "disk"), device.tier])
    for purpose, nbytes in step.by_purpose.items():
        ledger.take(DEVICE, purpose, nbytes)
    streamed = StreamedLayers(
        skeleton,
        WeightSizes(skeleton),
        ledger,
        kept=kept,
        n_slots=min(plan.slots, len(kept) + len(on_disk)),
        device=device,
        on_device=on_device,
        **streaming,
    )
    try:
        left = ledger.free(DEVICE)
        if left is not None:
            config = replace(config, kv_memory=kv_of(left, "device_memory", config.kv_limit))
        if config.kv_limit is not None:
            ledger.take(DEVICE, "kv", config.kv_limit)
    except BaseException:
        streamed.close()
        raise
    where_bytes = {DEVICE: ledger.by_purpose(DEVICE), HOST: ledger.by_purpose(HOST)}
    if on_disk:
        where_bytes[DISK] = {"weights": sum(size.layers[index].n_bytes for index in on_disk)}
    placement = _placement(plan, where_bytes, limit, found)
    return Opened(streamed.model, config, streamed, None, placement, ledger)


def _placement(
    plan: Plan, where: Mapping[str, Mapping[str, int]], limit: int | None, found: DevicePlan | None
) -> Placement:
    if found is None:
        return Placement(plan=plan, bytes=where, memory_bytes=limit)
    return Placement(plan=plan, bytes=where, memory_bytes=limit, workload=found.workload, said=(str(found),))
