"""Opening of a model inside a limit of host memory.

Some weights stay, others are streamed, and the rest of the memory is for KV.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

from millpond.budget import parse_bytes
from millpond.cache.layer.host_layer_cache import HostKV
from millpond.cache.tiered.block_store import STORE_BYTES
from millpond.cache.tiered.disk_tier import LEAST_SLOT_BYTES, N_SLOTS, SLOT_BYTES, DiskTier
from millpond.codec import DTYPES
from millpond.engine.config import EngineConfig
from millpond.engine.offload.cost import StepMemory
from millpond.engine.offload.machine import MachineConstants
from millpond.engine.offload.model_size import ModelSize, fingerprint, size_of
from millpond.engine.offload.plan import DEVICE, DISK, ENGINE, HOST, Capabilities, Plan, sentences
from millpond.engine.offload.planner import Workload, fastest_plan
from millpond.errors import BudgetError, OptionError, unknown
from millpond.models.cache_folder import check_folder
from millpond.models.load import load_model, resolve
from millpond.models.weights.packed_file import MemoryPacker, Report, packed_sizes
from millpond.models.weights.sizes import WeightSizes
from millpond.models.weights.skeleton import Skeleton
from millpond.models.weights.streamed import StreamedLayers
from millpond.tiers.buffers import aligned_down
from millpond.tiers.devices import SimulatedDevice
from millpond.tiers.free_memory import map_large_blocks
from millpond.tiers.ledger import Ledger, Tier

#: Tokens of one sequence, uncompressed, for which there must be memory.
MIN_TOKENS = 128


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Placement of a model that runs.

    Attributes:
        plan: The plan that it follows.
        bytes: Bytes by tier, then by purpose.
        memory_bytes: Limit of the host; None: no limit.
        workload: Workload that the plan was made for; None for a plan that was given, or a model that fits.
        said: Sentences of a plan that predicts nothing else.
    """

    plan: Plan
    bytes: Mapping[str, Mapping[str, int]]
    memory_bytes: int | None
    workload: Workload | None = None
    said: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [
            f"{tier}: " + ", ".join(f"{purpose} {nbytes / 2**20:,.1f} MiB" for purpose, nbytes in purposes.items())
            for tier, purposes in self.bytes.items()
        ]
        if self.workload is not None:
            lines.append(f"planned for prompts and answers of {self.workload}")
        if self.plan.prediction is not None:
            lines += sentences(self.plan)
        lines += self.said
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Opened:
    """A model that an engine can run.

    Attributes:
        model: Model of transformers.
        config: Settings, with the limit of KV.
        streamed: Its layers, where they do not all stay in memory.
        tier: Disk of KV, where some is on one.
        placement: Its placement.
        ledger: Record of the memory that it takes.
        host_kv: Layers whose KV is in the host's memory while the model is on a device; None where one memory holds it.
    """

    model: Any
    config: EngineConfig
    streamed: StreamedLayers | None
    tier: DiskTier | None
    placement: Placement
    ledger: Ledger
    host_kv: HostKV | None = None


def open_in_memory(
    name: str | PathLike[str],
    memory: str | int | None,
    plan: Plan | None,
    dtype: str | None,
    config: EngineConfig,
    *,
    disk: str | PathLike[str] | None = None,
    machine: MachineConstants | None = None,
    workload: Workload | None = None,
    report: Report | None = None,
    device: SimulatedDevice | None = None,
    capabilities: Capabilities = ENGINE,
    tiered: Mapping[str, Any] | None = None,
    **streaming: Any,
) -> Opened:
    """Open the model in a folder so that it takes at most `memory` of the host.

    Weights, KV and the buffers of a step count. A model that fits is loaded whole. Of another one the layers that the
    plan keeps stay; without a plan the fastest one is searched for. The rest becomes the limit of KV, unless `config`
    has a lower one. Matrices in codes (`config.weights`) are read from a file in `disk`, which is made where there is
    none; with neither `memory` nor `plan` they are packed in memory, one after another.

    Args:
        name: Name or folder of the model.
        memory: "512MiB" or bytes; None: no limit.
        plan: Placement to use; None searches for the fastest.
        dtype: Must equal the saved dtype, if it is given at all; any where matrices are packed in memory.
        config: Settings of the engine.
        disk: A folder for packed weights, and for KV that a plan puts on the disk; None: KV is in the model's folder.
        machine: Its constants; None: measured once and kept.
        workload: Workload that a plan is made for; None: `usual_workloads`.
        report: Called with the progress of measuring and packing.
        device: Stands for an accelerator, for tests; weights may be there then, and layers are computed from there.
        capabilities: Placements and schedules that a plan that is searched for may use.
        tiered: Further arguments of `DiskTier`.
        **streaming: Arguments of `StreamedLayers`.

    Raises:
        BudgetError: less memory than the smallest that runs.
        OptionError: no folder of safetensors, another dtype than the saved one, a plan that the engine does not run, or
            a disk folder that is missing, cannot be written or lacks room.
        DataError, UnsupportedModelError: as `Skeleton.of`.
    """
    folder = folder_of(name, dtype)
    disk_folder = None if disk is None else Path(disk)
    in_memory = config.weights is not None and memory is None and plan is None
    if disk_folder is not None:
        check_folder(disk_folder)
    elif config.weights is not None and not in_memory:
        raise no_folder(config.weights)
    skeleton = Skeleton.of(folder, DTYPES.get(str(dtype)) if in_memory else None)
    check_dtype(dtype, skeleton)
    limit = None if memory is None else parse_bytes(memory)
    if plan is not None:
        (ENGINE if device is None else replace(ENGINE, weights=(DEVICE, *ENGINE.weights))).check(plan)
        if plan.model:
            plan.check_model(fingerprint(skeleton, config.weights))
    size, searched = size_of(folder, skeleton, config.weights), False
    verified = streaming.get("verify") == "always"
    store_bytes = 0 if config.prefix_disk is None else STORE_BYTES
    if plan is not None:
        config = with_plan(config, plan)
    elif limit is None or _whole_bytes(size, config) + store_bytes <= limit:
        plan, workload = Plan(), None
    else:
        try:
            plan, workload = fastest_plan(
                size,
                config,
                limit - store_bytes,
                disk_folder,
                machine,
                workload,
                report,
                capabilities=capabilities,
                verified=verified,
            )
        except BudgetError as error:
            if not store_bytes:
                raise
            raise BudgetError(
                f"{error}; besides, prefix_disk= takes {store_bytes:,} bytes of memory for slots"
            ) from error
        config, searched = with_plan(config, plan), True
    step = _step(size, config)
    all_layers = range(len(size.layers))
    streamed_layers, kv_layers = plan.streamed_layers(len(all_layers)), plan.kv_layers_on_disk(len(all_layers))
    slot_bytes = kv_slot_bytes(limit) if kv_layers else 0
    on_device = () if device is None else plan.device_layers(len(all_layers))
    kept = [index for index in all_layers if index not in {*streamed_layers, *on_device}]
    ends_on_disk = plan.ends == DISK
    _check_ends(ends_on_disk, in_memory, verified)
    n_slots = min(
        plan.slots, len(streamed_layers) + len(kept) * (device is not None) + ends_on_disk * size.ends_on_disk.n_tiles
    )
    if limit is not None:
        map_large_blocks()
    if limit is not None and device is None:
        _check_memory(limit, size, step, kept, n_slots, N_SLOTS * slot_bytes + store_bytes, config, plan)
    ledger = Ledger([Tier(HOST, "host", limit), Tier(DISK, "disk"), *([] if device is None else [device.tier])])
    for purpose, nbytes in {**step.by_purpose, "slots for prompts": store_bytes}.items():
        ledger.take(HOST, purpose, nbytes)
    sizes = weight_sizes(skeleton, name, disk_folder, config.weights, report)
    streamed: StreamedLayers | None = None
    if streamed_layers or ends_on_disk or config.weights is not None or device is not None:
        with MemoryPacker(sizes, report) if in_memory else nullcontext() as pack:
            streamed = StreamedLayers(
                skeleton,
                sizes,
                ledger,
                kept=kept,
                n_slots=n_slots,
                device=device,
                on_device=on_device,
                ends_on_disk=ends_on_disk,
                pack=pack,
                **streaming,
            )
        model: Any = streamed.model
    else:
        ledger.take(HOST, "weights", sizes.kept_bytes(all_layers))
        model = load_model(folder, "auto" if dtype is None else dtype)
    tier: DiskTier | None = None
    if kv_layers:
        try:
            tier = DiskTier(
                folder if disk is None else Path(disk),
                kv_layers,
                ledger=ledger,
                slot_bytes=slot_bytes,
                micro_batch=plan.micro_batch,
                **tiered or {},
            )
        except BaseException:
            if streamed is not None:
                streamed.close()
            raise
    if limit is not None:
        config = replace(config, kv_memory=_kv_memory(ledger, config, streamed, searched))
    kv = config.kv_limit
    if kv is not None:
        ledger.take(HOST, "kv", kv)
    bytes_by_tier = {HOST: ledger.by_purpose(HOST)}
    if device is not None:
        bytes_by_tier = {DEVICE: ledger.by_purpose(DEVICE), **bytes_by_tier}
    on_disk = {"weights": sum(size.layers[index].n_bytes for index in streamed_layers)} if streamed_layers else {}
    if ends_on_disk:
        on_disk["embeddings and head"] = size.ends_on_disk.saved_bytes
    if on_disk:
        bytes_by_tier[DISK] = on_disk
    placement = Placement(plan=plan, bytes=bytes_by_tier, memory_bytes=limit, workload=workload)
    return Opened(model, config, streamed, tier, placement, ledger)


def no_folder(weights: str) -> OptionError:
    """Return the error of weights in codes without a folder for their file."""
    return OptionError(
        f"weights={weights!r} with memory= or plan=: packed weights are kept in a file; name a folder for it with disk="
    )


def weight_sizes(
    skeleton: Skeleton, name: str | PathLike[str], disk: Path | None, weights: str | None, report: Report | None
) -> WeightSizes:
    """Return the layout of the weights; those in codes are first packed into a file if needed."""
    if weights is None or disk is None:
        return WeightSizes(skeleton, weights)
    return packed_sizes(disk, Path(name).resolve().name.removesuffix(".gguf"), skeleton, weights, report)


def _step(size: ModelSize, config: EngineConfig) -> StepMemory:
    return StepMemory.of(size, step_tokens=config.max_step_tokens, running=config.max_running)


def _whole_bytes(size: ModelSize, config: EngineConfig) -> int:
    """Return the bytes with which the whole model runs under `config`."""
    step = _step(size, config)
    return size.n_bytes + step.nbytes + step.kv_bytes(MIN_TOKENS)


def with_plan(config: EngineConfig, plan: Plan) -> EngineConfig:
    """Return settings with those of a plan: sequences in one sweep, and prompt tokens."""
    block = plan.micro_batch if plan.schedule == "row" else plan.block
    return replace(
        config,
        max_step_tokens=plan.prompt_rows,
        spread_ages=config.spread_ages or plan.schedule == "diagonal",
        max_running=config.max_running if block is None else min(block, config.max_running),
    )


def kv_slot_bytes(limit: int | None) -> int:
    """Return the bytes of each slot that KV is read through.

    A small part of the memory, and large enough for the disk.
    """
    return SLOT_BYTES if limit is None else min(SLOT_BYTES, max(LEAST_SLOT_BYTES, aligned_down(limit // 64)))


def folder_of(name: str | PathLike[str], dtype: str | None) -> Path:
    """Return the folder of a model; GGUF files are made into one.

    Raises:
        OptionError: it is not here.
    """
    folder = Path(resolve(name, "auto" if dtype is None else dtype))
    if not folder.is_dir():
        raise OptionError(
            f"memory= needs a folder with safetensors files, a GGUF file, or the name of a model that is here; "
            f"{str(name)!r} is neither. Download the model first, and give its folder"
        )
    return folder


def check_dtype(dtype: str | None, skeleton: Skeleton) -> None:
    """Check that a dtype is that of the files.

    Raises:
        OptionError: an unknown dtype, or another than that of the files.
    """
    if dtype not in (None, "auto", *DTYPES):
        raise unknown("dtype", str(dtype), ["auto", *DTYPES])
    if dtype not in (None, "auto") and DTYPES.get(str(dtype)) != skeleton.dtype:
        saved = next(
            (name for name, files_dtype in DTYPES.items() if files_dtype == skeleton.dtype), str(skeleton.dtype)
        )
        raise OptionError(
            f"dtype={dtype!r}: weights that are read layer by layer run as they were saved, in {saved!r}; leave dtype "
            "out, or save the model in that dtype"
        )


def _check_ends(ends_on_disk: bool, in_memory: bool, verified: bool) -> None:
    """Check that embeddings and head on a disk are not to be verified at each read.

    Raises:
        OptionError: they are.
    """
    assert not (ends_on_disk and in_memory), "a plan has a file to read from"
    if ends_on_disk and verified:
        raise OptionError(
            "verify='always' compares whole parts with their checksums, and a plan with ends='disk' reads rows of the "
            "embeddings and tiles of the head; leave verify out, or give a plan with ends='host'"
        )


def _check_memory(
    limit: int,
    size: ModelSize,
    step: StepMemory,
    kept: list[int],
    n_slots: int,
    kv_slots: int,
    config: EngineConfig,
    plan: Plan,
) -> None:
    slots, kv, ends = n_slots * size.slot_bytes, step.kv_bytes(MIN_TOKENS), size.end_bytes
    if plan.ends == DISK:
        slots, ends = slots + size.ends_on_disk.row_room_bytes, size.ends_on_disk.held_bytes
    if plan.prediction is not None:  # a plan for shorter texts, or with a smaller cache
        kv = min(kv, plan.prediction.bytes.get(HOST, {}).get("kv", kv))
    weights = ends + sum(size.layers[index].n_bytes for index in kept)
    smallest = weights + slots + kv_slots + step.nbytes + kv
    if limit < smallest:
        parts = {"weights that stay": weights, f"{n_slots} slots for layers": slots, "slots for KV": kv_slots}
        parts |= {**step.by_purpose} | {"KV": kv}
        parts_text = ", ".join(f"{name} {nbytes:,}" for name, nbytes in parts.items() if nbytes)
        raise BudgetError(
            f"memory={limit:,} bytes is less than the smallest that runs, {smallest:,} ({parts_text}); raise it, or "
            f"lower max_step_tokens ({config.max_step_tokens}) or max_running ({config.max_running})"
            + (", or keep fewer layers in the plan" if kept else "")
            + (", or embeddings and head on the disk (ends='disk')" if plan.ends == HOST and n_slots else "")
        )


def _kv_memory(ledger: Ledger, config: EngineConfig, streamed: StreamedLayers | None, searched: bool) -> int:
    """Return the bytes for KV; with a plan that was searched for at most those that it left.

    Raises:
        BudgetError: `kv_memory` is more than what is left.
    """
    free_bytes = ledger.free(HOST)
    assert free_bytes is not None, "the host has a limit"
    if searched:
        return min(free_bytes, config.kv_limit or free_bytes)
    try:
        return kv_of(free_bytes, "memory", config.kv_limit)
    except BudgetError:
        if streamed is not None:
            streamed.close()
        raise


def kv_of(free_bytes: int, limit: str, requested: int | None) -> int:
    """Return the bytes for KV, of those that are free.

    Args:
        free_bytes: Bytes that the limit leaves.
        limit: The option that leaves them.
        requested: `kv_memory` in bytes; None: all.

    Raises:
        BudgetError: more are requested than are free.
    """
    if requested is not None and requested > free_bytes:
        raise BudgetError(
            f"kv_memory={requested:,} bytes is more than the {free_bytes:,} that {limit} leaves for KV; lower it, or "
            f"raise {limit}"
        )
    return free_bytes if requested is None else requested
