"""Opening of a model inside a limit of host memory: what stays in memory, what is read in every sweep, what is left for
KV."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

from millpond.budget import parse_bytes
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
LEAST_TOKENS = 128


@dataclass(frozen=True, kw_only=True)
class Placement:
    """What lies where while a model runs.

    Attributes:
        plan: what it follows. bytes: by tier, then by purpose. memory_bytes: limit of the host; None: no limit.
        workload: that the plan was made for; None for one that was given, or a model that fits. said: sentences of a
            plan that predicts nothing else.
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
        model: of transformers. config: with the limit that KV has. streamed: its layers, where they do not all stay
            in memory. tier: of KV on a disk, where some is. ledger: of the memory that it takes.
    """

    model: Any
    config: EngineConfig
    streamed: StreamedLayers | None
    tier: DiskTier | None
    placement: Placement
    ledger: Ledger


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
    can: Capabilities = ENGINE,
    tiered: Mapping[str, Any] | None = None,
    **streaming: Any,
) -> Opened:
    """Open the model in a folder so that weights, KV and the buffers of a step take at most `memory` of the host.

    A model that fits is loaded whole. Of another one the layers that the plan keeps stay; without a plan the fastest
    one is searched for. What is left becomes the limit of KV, unless `config` has a lower one. Matrices in codes
    (`config.weights`) are read from a file in `disk`, which is made where there is none; with neither `memory` nor
    `plan` they are packed in memory, one after another.

    Args:
        memory: "512MiB" or bytes; None: no limit. plan: None for one that is made here. dtype: as it was saved, if it
            is given at all; any where matrices are packed in memory. disk: a folder for packed weights, and for KV
            that a plan puts on the disk; None: KV lies in that of the model. machine: its constants; None: measured
            once and kept. workload: that a plan is made for; None: `usual`. report: shown how far measuring and packing
            are. device: that stands for an accelerator, for tests; weights may lie there then, and layers are computed
            from there. can: what a plan that is searched for may use. tiered: further arguments of `DiskTier`.
            streaming: of `StreamedLayers`.

    Raises:
        BudgetError: less memory than the smallest that runs. OptionError: no folder of safetensors, another dtype than
            the saved one, a plan that the engine does not run, or a disk folder that is missing, cannot be written or
            lacks room. DataError, UnsupportedModelError: as `Skeleton.of`.
    """
    folder = folder_of(name, dtype)
    place = None if disk is None else Path(disk)
    in_memory = config.weights is not None and memory is None and plan is None
    if place is not None:
        check_folder(place)
    elif config.weights is not None and not in_memory:
        raise OptionError(
            f"weights={config.weights!r} with memory= or plan=: packed weights are kept in a file; name a folder for "
            "it with disk="
        )
    skeleton = Skeleton.of(folder, DTYPES.get(str(dtype)) if in_memory else None)
    check_dtype(dtype, skeleton)
    limit = None if memory is None else parse_bytes(memory)
    if plan is not None:
        (ENGINE if device is None else replace(ENGINE, weights=(DEVICE, *ENGINE.weights))).check(plan)
        if plan.model:
            plan.check_model(fingerprint(skeleton, config.weights))
    size, searched = size_of(folder, skeleton, config.weights), False
    verified = streaming.get("verify") == "always"
    beside = 0 if config.prefix_disk is None else STORE_BYTES
    if plan is not None:
        config = _with_plan(config, plan)
    elif limit is None or _whole_bytes(size, config) + beside <= limit:
        plan, workload = Plan(), None
    else:
        try:
            plan, workload = fastest_plan(
                size, config, limit - beside, place, machine, workload, report, can=can, verified=verified
            )
        except BudgetError as error:
            if not beside:
                raise
            raise BudgetError(f"{error}; besides, prefix_disk= takes {beside:,} bytes of memory for slots") from error
        config, searched = _with_plan(config, plan), True
    step = _step(size, config)
    every = range(len(size.layers))
    streamed_layers, kv_layers = plan.streamed_layers(len(every)), plan.kv_layers_on_disk(len(every))
    slot_bytes = _kv_slot_bytes(limit) if kv_layers else 0
    on_device = () if device is None else plan.device_layers(len(every))
    kept = [index for index in every if index not in {*streamed_layers, *on_device}]
    far = plan.ends == DISK
    _check_ends(far, in_memory, verified)
    n_slots = min(plan.slots, len(streamed_layers) + len(kept) * (device is not None) + far * size.far_ends.n_tiles)
    if limit is not None:
        map_large_blocks()
    if limit is not None and device is None:
        _check_memory(limit, size, step, kept, n_slots, N_SLOTS * slot_bytes + beside, config, plan)
    ledger = Ledger([Tier(HOST, "host", limit), Tier(DISK, "disk"), *([] if device is None else [device.tier])])
    for purpose, nbytes in {**step.by_purpose, "slots for prompts": beside}.items():
        ledger.take(HOST, purpose, nbytes)
    sizes = _sizes(skeleton, name, place, config.weights, report)
    streamed: StreamedLayers | None = None
    if streamed_layers or far or config.weights is not None or device is not None:
        with MemoryPacker(sizes, report) if in_memory else nullcontext() as pack:
            streamed = StreamedLayers(
                skeleton,
                sizes,
                ledger,
                kept=kept,
                n_slots=n_slots,
                device=device,
                on_device=on_device,
                ends_on_disk=far,
                pack=pack,
                **streaming,
            )
        model: Any = streamed.model
    else:
        ledger.take(HOST, "weights", sizes.kept_bytes(every))
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
    where = {HOST: ledger.by_purpose(HOST)}
    if device is not None:
        where = {DEVICE: ledger.by_purpose(DEVICE), **where}
    on_disk = {"weights": sum(size.layers[index].n_bytes for index in streamed_layers)} if streamed_layers else {}
    if far:
        on_disk["embeddings and head"] = size.far_ends.saved_bytes
    if on_disk:
        where[DISK] = on_disk
    placement = Placement(plan=plan, bytes=where, memory_bytes=limit, workload=workload)
    return Opened(model, config, streamed, tier, placement, ledger)


def _sizes(
    skeleton: Skeleton, name: str | PathLike[str], disk: Path | None, weights: str | None, report: Report | None
) -> WeightSizes:
    """Where the weights lie; those in codes of a file are packed first, where they are not."""
    if weights is None or disk is None:
        return WeightSizes(skeleton, weights)
    return packed_sizes(disk, Path(name).resolve().name.removesuffix(".gguf"), skeleton, weights, report)


def _step(size: ModelSize, config: EngineConfig) -> StepMemory:
    return StepMemory.of(size, step_tokens=config.max_step_tokens, running=config.max_running)


def _whole_bytes(size: ModelSize, config: EngineConfig) -> int:
    """Bytes with which the whole model runs as `config` says."""
    step = _step(size, config)
    return size.n_bytes + step.nbytes + step.kv_bytes(LEAST_TOKENS)


def _with_plan(config: EngineConfig, plan: Plan) -> EngineConfig:
    """The engine's settings that a plan decides: sequences in one sweep, and tokens of prompts."""
    block = plan.micro_batch if plan.schedule == "row" else plan.block
    return replace(
        config,
        max_step_tokens=plan.prompt_rows,
        spread_ages=config.spread_ages or plan.schedule == "diagonal",
        max_running=config.max_running if block is None else min(block, config.max_running),
    )


def _kv_slot_bytes(limit: int | None) -> int:
    """Of each slot that KV is read through: a small part of the memory, and large enough for the disk."""
    return SLOT_BYTES if limit is None else min(SLOT_BYTES, max(LEAST_SLOT_BYTES, aligned_down(limit // 64)))


def folder_of(name: str | PathLike[str], dtype: str | None) -> Path:
    """The folder of a model, GGUF files made into one.

    Raises:
        OptionError: it is not here.
    """
    folder = Path(resolve(name, "auto" if dtype is None else dtype))
    if not folder.is_dir():
        raise OptionError(
            f"memory= needs a folder with safetensors files, a GGUF file, or the name of a model that is here; "
            f"{str(name)!r} is none of them. Download it first, and give its folder"
        )
    return folder


def check_dtype(dtype: str | None, skeleton: Skeleton) -> None:
    """
    Raises:
        OptionError: an unknown dtype, or another than that of the files.
    """
    if dtype not in (None, "auto", *DTYPES):
        raise unknown("dtype", str(dtype), ["auto", *DTYPES])
    if dtype not in (None, "auto") and DTYPES.get(str(dtype)) != skeleton.dtype:
        saved = next((name for name, known in DTYPES.items() if known == skeleton.dtype), str(skeleton.dtype))
        raise OptionError(
            f"dtype={dtype!r}: weights that are read layer by layer run as they were saved, in {saved!r}; leave dtype "
            "out, or save the model in that dtype"
        )


def _check_ends(far: bool, in_memory: bool, verified: bool) -> None:
    """
    Raises:
        OptionError: embeddings and head on a disk, and checksums of what is read of them compared at each read.
    """
    assert not (far and in_memory), "a plan has a file to read from"
    if far and verified:
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
    slots, kv, ends = n_slots * size.slot_bytes, step.kv_bytes(LEAST_TOKENS), size.end_bytes
    if plan.ends == DISK:
        slots, ends = slots + size.far_ends.row_room_bytes, size.far_ends.held_bytes
    if plan.prediction is not None:  # a plan for shorter texts, or with a smaller cache
        kv = min(kv, plan.prediction.bytes.get(HOST, {}).get("kv", kv))
    weights = ends + sum(size.layers[index].n_bytes for index in kept)
    smallest = weights + slots + kv_slots + step.nbytes + kv
    if limit < smallest:
        parts = {"weights that stay": weights, f"{n_slots} slots for layers": slots, "slots for KV": kv_slots}
        parts |= {**step.by_purpose} | {"KV": kv}
        shown = ", ".join(f"{name} {nbytes:,}" for name, nbytes in parts.items() if nbytes)
        raise BudgetError(
            f"memory={limit:,} bytes is less than the smallest that runs, {smallest:,} ({shown}); raise it, or lower "
            f"max_step_tokens ({config.max_step_tokens}) or max_running ({config.max_running})"
            + (", or keep fewer layers in the plan" if kept else "")
            + (", or embeddings and head on the disk (ends='disk')" if plan.ends == HOST and n_slots else "")
        )


def _kv_memory(ledger: Ledger, config: EngineConfig, streamed: StreamedLayers | None, searched: bool) -> int:
    """Bytes for KV; with a plan that was searched for at most those that it left.

    Raises:
        BudgetError: `kv_memory` is more than what is left.
    """
    left = ledger.free(HOST)
    assert left is not None, "the host has a limit"
    if searched:
        return min(left, config.kv_limit or left)
    try:
        return kv_of(left, "memory", config.kv_limit)
    except BudgetError:
        if streamed is not None:
            streamed.close()
        raise


def kv_of(left: int, limit: str, wanted: int | None) -> int:
    """Bytes for KV, of those that are left.

    Args:
        limit: the option that leaves them. wanted: `kv_memory` in bytes; None: all.

    Raises:
        BudgetError: more are wanted than are left.
    """
    if wanted is not None and wanted > left:
        raise BudgetError(
            f"kv_memory={wanted:,} bytes is more than the {left:,} that {limit} leaves for KV; lower it, or raise "
            f"{limit}"
        )
    return left if wanted is None else wanted
