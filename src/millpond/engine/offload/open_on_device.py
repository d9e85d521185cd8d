"""A model opened inside the memory of an accelerator: layers that it does not hold are copied to it in each step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from os import PathLike
from typing import Any

import torch

from millpond.budget import parse_bytes
from millpond.engine.config import EngineConfig
from millpond.engine.offload.capabilities import Capabilities
from millpond.engine.offload.device_plan import DevicePlan, device_plan
from millpond.engine.offload.model_size import fingerprint, size_of
from millpond.engine.offload.open import Opened, Placement, check_dtype, folder_of
from millpond.engine.offload.plan import DEVICE, DISK, HOST, Plan
from millpond.engine.offload.step_memory import StepMemory
from millpond.engine.offload.workload import Workload
from millpond.errors import BudgetError, OptionError
from millpond.models.weights.sizes import WeightSizes
from millpond.models.weights.skeleton import Skeleton
from millpond.models.weights.streamed import StreamedLayers
from millpond.tiers.cuda import CudaDevice
from millpond.tiers.ledger import Ledger, Tier

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
        config = replace(config, kv_memory=_kv_memory(ledger, config))
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


def _kv_memory(ledger: Ledger, config: EngineConfig) -> int | None:
    """Bytes for KV on the device.

    Raises:
        BudgetError: `kv_memory` is more than what is left.
    """
    left, wanted = ledger.free(DEVICE), config.kv_limit
    if left is None or wanted is None:
        return wanted if left is None else left
    if wanted > left:
        raise BudgetError(
            f"kv_memory={wanted:,} bytes is more than the {left:,} that device_memory leaves for KV; lower it, or "
            "raise device_memory"
        )
    return wanted
