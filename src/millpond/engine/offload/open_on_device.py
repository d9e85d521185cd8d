"""Opening of a model inside the memory of an accelerator: some layers stay there, others are copied in each step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from millpond.budget import parse_bytes
from millpond.cache.attention.sparse_values import SparseValues
from millpond.cache.layer.host_layer_cache import HostKV
from millpond.cache.pages.tier_limits import TierLimits
from millpond.cache.paging.choose import keeps_prompts
from millpond.cache.tiered.disk_tier import DiskTier
from millpond.engine.config import EngineConfig
from millpond.engine.offload.cost import StepMemory
from millpond.engine.offload.device_search import fastest_device_plan
from millpond.engine.offload.graph_memory import recorded_bytes, records
from millpond.engine.offload.kv_size import KVSize, kv_size, planned
from millpond.engine.offload.machine import Accelerator, MachineConstants
from millpond.engine.offload.model_size import ModelSize, fingerprint, size_of
from millpond.engine.offload.open import (
    Opened,
    Placement,
    check_dtype,
    folder_of,
    kv_of,
    kv_slot_bytes,
    no_folder,
    weight_sizes,
    with_plan,
)
from millpond.engine.offload.plan import DEVICE, DISK, HOST, SLOTS, TIERS, Capabilities, Plan, spread
from millpond.engine.offload.planner import Workload, usual_workloads
from millpond.engine.offload.search import Limits
from millpond.errors import BudgetError
from millpond.hf.cache_spec import policy_of
from millpond.kernels.card import Card
from millpond.models.cache_folder import check_folder
from millpond.models.device import check_dtype_there
from millpond.models.weights.packed_file import Report
from millpond.models.weights.skeleton import Skeleton
from millpond.models.weights.streamed import StreamedLayers
from millpond.runner.cache_factory import attends_on_host
from millpond.tiers.cuda import Bandwidths, CudaDevice
from millpond.tiers.devices import Device
from millpond.tiers.ledger import Ledger, Tier

#: Bytes per second of a disk, assumed where nothing was measured.
DISK_BYTES_PER_S = 1e9


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """A plan for a device, and its figures.

    Attributes:
        plan: The plan.
        workload: Texts that it was made for.
        sequences: Sequences that run together.
        sweep_s: Predicted seconds of a decoding step.
        tokens_per_s: Tokens per second while all decode.
    """

    plan: Plan
    workload: Workload
    sequences: int
    sweep_s: float

    @property
    def tokens_per_s(self) -> float:
        return self.sequences / self.sweep_s

    def __str__(self) -> str:
        shares_text = ", ".join(f"{share:.0%} {tier}" for tier, share in self.plan.weights.items())
        return (
            f"layers: {shares_text}; at most {self.sequences} sequences of {self.workload}, a step in "
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
    *,
    recorded: bool = False,
) -> DevicePlan:
    """Return the plan with the most tokens per second of a model whose KV is on the device.

    A layer that stays there is not copied in each step, and leaves less memory for KV, thus for sequences that share
    the copies. All numbers of layers are compared. Layers that the host's memory does not hold are read from the disk.

    Args:
        size: Sizes of the model.
        config: Settings of the engine.
        device_memory: Bytes of the device.
        memory: Bytes of the host that weights may take; None: no limit.
        speed: Bandwidths of the device.
        workload: Texts that it is made for; None: the longest of `usual_workloads` of which one sequence fits.
        recorded: Whether steps are recorded as graphs where all layers are on the device.

    Raises:
        BudgetError: not one sequence fits.
        OptionError: a workload beyond the model's context.
    """
    step = StepMemory.of(size, step_tokens=config.max_step_tokens, running=config.max_running)
    for tried_workload in [workload] if workload is not None else usual_workloads(size.context):
        tried_workload.check_context(size.context)
        kv = kv_size(size, tried_workload.prompt, tried_workload.new, **planned(config), memory=device_memory)
        plans = [
            plan
            for n in range(len(size.layers) + 1)
            if (plan := _with_layers(n, size, config, step, kv, device_memory, memory, speed, tried_workload, recorded))
            is not None
        ]
        if plans:
            return max(plans, key=lambda plan: plan.tokens_per_s)
    min_bytes = size.end_bytes + min(SLOTS, len(size.layers)) * size.slot_bytes + step.nbytes + kv.most
    raise BudgetError(
        f"device_memory={device_memory:,} bytes is less than the smallest that runs {tried_workload}, "
        f"{min_bytes:,} (embeddings and head {size.end_bytes:,}, slots for layers, a step "
        f"{step.nbytes:,}, KV {kv.most:,}); raise it, or lower "
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
    recorded: bool,
) -> DevicePlan | None:
    """Return the plan with `n` layers on the device; None where no sequence fits there."""
    num_layers = len(size.layers)
    on_device = set(spread(n, num_layers))
    copied_layers = [layer.n_bytes for index, layer in enumerate(size.layers) if index not in on_device]
    slots = min(SLOTS, len(copied_layers)) * size.slot_bytes
    free = device_memory - size.end_bytes - (size.layer_bytes - sum(copied_layers)) - slots - step.nbytes
    if recorded and not copied_layers:
        free -= recorded_bytes(size, config, workload)
    if config.kv_limit is not None:
        free = min(free, config.kv_limit)
    reading = max(kv.most - kv.held, 0)  # one prompt is read while the others decode
    sequences = min(config.max_running, (free - reading) // max(kv.held, 1))
    if free < kv.most or sequences < 1:
        return None
    host_bytes, in_host = 0, 0
    for nbytes in copied_layers:
        if memory is not None and host_bytes + nbytes > memory:
            break
        host_bytes, in_host = host_bytes + nbytes, in_host + 1
    on_disk = len(copied_layers) - in_host
    copied = sum(copied_layers)
    read = copied - host_bytes
    seconds = max(
        copied / speed.link, read / DISK_BYTES_PER_S, (size.n_bytes + sequences * kv.step_bytes) / speed.memory
    )
    plan = Plan(
        weights={DEVICE: n / num_layers, HOST: in_host / num_layers, DISK: on_disk / num_layers},
        prompt_rows=config.max_step_tokens,
    )
    return DevicePlan(plan, workload, sequences, seconds)


#: Capabilities of an engine there. Embeddings and head are on the device.
ON_DEVICE = Capabilities(weights=TIERS, kv=TIERS, ends=("host",))


def open_on_device(
    name: str | PathLike[str],
    gpu: torch.device,
    device_memory: str | int | None,
    memory: str | int | None,
    plan: Plan | None,
    dtype: str | None,
    config: EngineConfig,
    *,
    disk: str | PathLike[str] | None = None,
    machine: MachineConstants | None = None,
    workload: Workload | None = None,
    device: Device | None = None,
    report: Report | None = None,
    tiered: Mapping[str, Any] | None = None,
    **streaming: Any,
) -> Opened:
    """Open the model in a folder so that it takes at most `device_memory` of the device.

    Weights, KV and the buffers of a step count. Matrices in codes (`config.weights`) pass the link as codes, which the
    device widens some rows at a time.

    Args:
        name: Name or folder of the model.
        gpu: The GPU.
        device_memory: "16GiB" or bytes; None: no limit, which a plan needs.
        memory: Limit of weights and KV in the host's memory; None: no limit.
        plan: Placement to use; None searches for the fastest: with `memory` and scipy over all shares of weights and
            KV, else with all KV on the device.
        dtype: Must equal the saved dtype, if it is given at all.
        config: Settings of the engine.
        disk: A folder for packed weights, and for KV that a plan puts on the disk; None: KV is in the model's folder.
        machine: Constants of the host, for a plan that is searched for; None: measured once and kept.
        workload: Workload that a plan is made for.
        device: Device to use, one that can be measured where there is no plan; None: made here.
        report: Called with the progress of packing.
        tiered: Further arguments of `DiskTier`.
        **streaming: Arguments of `StreamedLayers`.

    Raises:
        BudgetError: less memory than the smallest that runs, or more than the device has free.
        OptionError: no folder of safetensors, another dtype than the saved one, or one that the device lacks, weights
            in codes without a folder, a disk folder that is missing or cannot be written, or a plan that a device does
            not run.
        DataError, UnsupportedModelError: as `Skeleton.of`.
    """
    if disk is not None:
        check_folder(Path(disk))
    elif config.weights is not None:
        raise no_folder(config.weights)
    folder = folder_of(name, dtype)
    skeleton = Skeleton.of(folder)
    check_dtype(dtype, skeleton)
    check_dtype_there(gpu, skeleton.dtype)
    capacity = None if device_memory is None else parse_bytes(device_memory)
    limit = None if memory is None else parse_bytes(memory)
    if gpu.type == "cuda" and capacity is not None:
        check_device_memory(Card.of(gpu), capacity)
    device = device or CudaDevice(gpu, capacity)
    size, said = size_of(folder, skeleton, config.weights), tuple[str, ...]()
    if plan is None:
        assert capacity is not None, "checked by those who ask for it"
        assert isinstance(device, CudaDevice), "one that can be measured"
        speed = device.measure()
        if limit is None or find_spec("scipy") is None:
            searched = device_plan(size, config, capacity, limit, speed, workload, recorded=records(gpu))
            plan, workload, said = searched.plan, searched.workload, (str(searched),)
        else:
            plan, workload = fastest_device_plan(
                size,
                config,
                Limits(
                    memory=limit,
                    device_memory=capacity,
                    sequences=config.max_running,
                    prompt_rows=config.max_step_tokens,
                    kv=config.kv_limit,
                ),
                Accelerator(flops=speed.flops, memory_per_s=speed.memory, link_per_s=speed.link),
                _capabilities(config),
                None if disk is None else Path(disk),
                machine,
                workload,
                report,
            )
    else:
        workload = None
        ON_DEVICE.check(plan)
        if plan.model:
            plan.check_model(fingerprint(skeleton, config.weights))
    config = with_plan(config, plan)
    n, step = len(size.layers), StepMemory.of(size, step_tokens=plan.prompt_rows, running=config.max_running)
    on_device, on_disk = plan.device_layers(n), plan.streamed_layers(n)
    kept = [index for index in range(n) if index not in {*on_device, *on_disk}]
    ledger = Ledger([Tier(HOST, "host", limit), Tier(DISK, "disk"), device.tier])
    for purpose, nbytes in step.by_purpose.items():
        ledger.take(DEVICE, purpose, nbytes)
    if records(gpu) and not kept and not on_disk:
        ledger.take(DEVICE, "graphs", recorded_bytes(size, config, workload or Workload()))
    streamed = StreamedLayers(
        skeleton,
        weight_sizes(skeleton, name, None if disk is None else Path(disk), config.weights, report),
        ledger,
        kept=kept,
        n_slots=min(plan.slots, len(kept) + len(on_disk)),
        device=device,
        on_device=on_device,
        **streaming,
    )
    tier: DiskTier | None = None
    try:
        kv_on_disk, host_layers = plan.kv_layers_on_disk(n), plan.kv_layers_on_host(n)
        if host_layers:
            ledger.take(HOST, "attention", step.nbytes)  # at most what a step takes on the device
        if kv_on_disk:
            tier = DiskTier(
                folder if disk is None else Path(disk),
                kv_on_disk,
                ledger=ledger,
                slot_bytes=kv_slot_bytes(limit),
                micro_batch=plan.micro_batch,
                **tiered or {},
            )
        config, host_kv = _kv_memory(config, ledger, frozenset(host_layers), n, device, tier, plan.values)
    except BaseException:
        streamed.close()
        if tier is not None:
            tier.close()
        raise
    bytes_by_tier = {DEVICE: ledger.by_purpose(DEVICE), HOST: ledger.by_purpose(HOST)}
    if on_disk:
        bytes_by_tier[DISK] = {"weights": sum(size.layers[index].n_bytes for index in on_disk)}
    placement = Placement(plan=plan, bytes=bytes_by_tier, memory_bytes=limit, workload=workload, said=said)
    return Opened(streamed.model, config, streamed, tier, placement, ledger, host_kv)


def check_device_memory(card: Card, capacity: int) -> None:
    """Check that a card has free what a user wants to take of it.

    Raises:
        BudgetError: it has not.
    """
    if capacity > card.free_bytes:
        raise BudgetError(
            f"device_memory={capacity:,} bytes is more than {card.name} has free, {card.free_bytes:,} of "
            f"{card.total_bytes:,}; lower it, or end what else takes memory there"
        )


def _capabilities(config: EngineConfig) -> Capabilities:
    """Return the placements that a plan that is searched for may use.

    All KV is on the device where a method or a setting needs it there.
    """
    policy = policy_of(str(config.choice.method), dict(config.options))
    one_memory = keeps_prompts(config.prefix_cache) or config.overflow == "rolling" or not attends_on_host(policy)
    return replace(ON_DEVICE, kv=(DEVICE,)) if one_memory else ON_DEVICE


def _kv_memory(
    config: EngineConfig,
    ledger: Ledger,
    host_layers: frozenset[int],
    n_layers: int,
    device: Device,
    tier: DiskTier | None,
    values: float,
) -> tuple[EngineConfig, HostKV | None]:
    """Take the memory of KV on both sides.

    Returns settings with that of the device, and the layers on the host. `kv_memory` is divided as the layers are.

    Raises:
        BudgetError: `kv_memory` is more than what is left.
    """
    requested = config.kv_limit
    if not host_layers:
        left = ledger.free(DEVICE)
        if left is not None:
            config = replace(config, kv_memory=kv_of(left, "device_memory", requested))
        if config.kv_limit is not None:
            ledger.take(DEVICE, "kv", config.kv_limit)
        return config, None
    of_host = None if requested is None else requested * len(host_layers) // n_layers
    shares = {HOST: of_host, DEVICE: None if requested is None or of_host is None else requested - of_host}
    if len(host_layers) == n_layers:
        shares[DEVICE] = 0
    limits: dict[str, int | None] = {}
    for side, option in ((DEVICE, "device_memory"), (HOST, "memory")):
        left = ledger.free(side)
        limits[side] = shares[side] if left is None else kv_of(left, option, shares[side])
        if (taken := limits[side]) is not None:
            ledger.take(side, "kv", taken)
    whole = TierLimits(limits[DEVICE], limits[HOST], pinned=tier is not None)
    sparse = None if values == 1 else SparseValues(values)
    return config, HostKV(host_layers, device, whole, sparse)
