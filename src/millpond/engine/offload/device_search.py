"""Search for the fastest plan of a model on a device: all six shares of weights and KV from a linear program."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from millpond.engine.config import EngineConfig
from millpond.engine.offload.cost import PLACES, BlockShape, CostModel
from millpond.engine.offload.kv_size import kv_size, planned
from millpond.engine.offload.machine import Accelerator, MachineConstants
from millpond.engine.offload.model_size import ModelSize
from millpond.engine.offload.plan import DEVICE, DISK, HOST, SLOTS, Capabilities, Plan
from millpond.engine.offload.planner import Workload, constants_for, usual_workloads
from millpond.engine.offload.search import (
    Limits,
    Shares,
    block_seconds,
    block_sizes,
    fits,
    is_allowed,
    predicted,
    solve_linear,
)
from millpond.errors import BudgetError
from millpond.models.weights.packed_file import Report

#: Largest error of a number of layers, as a share of one.
_ROUNDING = 1e-6


def fastest_device_plan(
    size: ModelSize,
    config: EngineConfig,
    limits: Limits,
    accelerator: Accelerator,
    capabilities: Capabilities,
    disk: Path | None,
    machine: MachineConstants | None = None,
    workload: Workload | None = None,
    report: Report | None = None,
) -> tuple[Plan, Workload]:
    """Return the plan with the most tokens per second, and the workload that it was made for.

    For each number of sequences the shares of weights and KV on the device, the host and the disk are those with which
    a block takes the least time: FlexGen (Sheng et al., 2023), section 4.3 and appendix A.3.

    Args:
        size: Sizes of the model.
        config: Settings of the engine.
        limits: Bytes of the device and of the host, and most sequences.
        accelerator: Speeds of the device.
        capabilities: Placements and schedules that the plan may use.
        disk: Folder for KV; None: KV is on no disk.
        machine: Constants of the host; None: measured once and kept.
        workload: Workload to plan for; None: the longest of `usual_workloads` of which one sequence fits.
        report: Called with the progress of measuring.

    Raises:
        BudgetError: not one sequence fits.
        OptionError: a workload beyond the model's context, scipy is not installed, or the host cannot be measured.
    """
    if disk is None:
        capabilities = replace(capabilities, kv=tuple(tier for tier in capabilities.kv if tier != DISK))
    constants = constants_for(size.folder, disk, report=report) if machine is None else machine
    constants = replace(constants, accelerator=accelerator)
    for tried in [workload] if workload is not None else usual_workloads(size.context):
        tried.check_context(size.context)
        kv = kv_size(size, tried.prompt, tried.new, **planned(config), memory=limits.device_memory)
        found = _search(CostModel(size, kv, constants), limits, capabilities)
        if found is not None:
            return found, tried
    raise BudgetError(
        f"device_memory={limits.device_memory:,} and memory={limits.memory:,} bytes hold no sequence of {tried} with "
        f"the slots of layers and the buffers of a step of {limits.prompt_rows} prompt tokens; raise one of them, or "
        f"lower max_step_tokens ({config.max_step_tokens}) or max_running ({config.max_running})"
    )


def _search(cost: CostModel, limits: Limits, capabilities: Capabilities) -> Plan | None:
    """Return the plan of the highest throughput; None where nothing fits."""
    best: Plan | None = None
    for block in _blocks(limits, capabilities):
        if limits.kv is not None and block.sequences * cost.kv.held > limits.kv:
            continue
        shares = best_shares(cost, block, limits, capabilities)
        if shares is None:
            continue
        plan = predicted(cost, block, shares)
        assert plan.prediction is not None, "a plan that was searched for"
        if best is None or best.prediction is None or plan.prediction.tokens_per_s > best.prediction.tokens_per_s:
            best = plan
    return best


def _blocks(limits: Limits, capabilities: Capabilities) -> Iterator[BlockShape]:
    """Yield the blocks that are tried: of equal ones a block schedule comes first."""
    for schedule in ("zigzag", "diagonal"):
        if schedule not in capabilities.schedules:
            continue
        for sequences in block_sizes(limits.sequences):
            for slots in (0, 2, SLOTS):
                yield BlockShape(
                    sequences=sequences,
                    micro_batch=sequences,
                    prompt_rows=limits.prompt_rows,
                    schedule=schedule,
                    slots=slots,
                )


def best_shares(cost: CostModel, block: BlockShape, limits: Limits, capabilities: Capabilities) -> Shares | None:
    """Return the shares with which a block takes the least time; None: it does not fit.

    Layers are whole. KV on a disk takes memory however little it is, which no linear program knows: it is solved with
    it, and without.
    """
    free = [place for place in PLACES if is_allowed(place, capabilities)]
    if not block.slots:  # no layer is copied
        free = [place for place in free if place not in ("weights host", "weights disk")]
    choices = [free, [place for place in free if place != "kv disk"]] if "kv disk" in free else [free]
    solutions = [solve_linear(cost, block, limits, choice) for choice in choices]
    whole = [
        rounded
        for shares in solutions
        if shares is not None
        for rounded in _whole_layers(shares, len(cost.model.layers))
        if fits(cost.bytes(block), rounded, limits)
    ]

    def order(shares: Shares) -> tuple[float, float, float]:
        """Of equal times the most on the device comes first, then the most on the host."""
        near, host = (sum(shares[f"{kind} {tier}"] for kind in ("weights", "kv")) for tier in (DEVICE, HOST))
        return float(f"{block_seconds(cost, block, shares):.6g}"), -near, -host

    return min(whole, key=order, default=None)


def _whole_layers(shares: Shares, n: int) -> Iterator[Shares]:
    """Yield shares in whole layers.

    Of each kind the device's is rounded down or one less, the host's up or down. What is left is on the disk, or on the
    host where no share is on a disk.
    """
    for weights in _rounded(shares, "weights", n):
        for kv in _rounded(shares, "kv", n):
            yield {**weights, **kv}


def _rounded(shares: Shares, kind: str, n: int) -> Sequence[Shares]:
    layers = {tier: shares.get(f"{kind} {tier}", 0.0) * n for tier in (DEVICE, HOST, DISK)}
    found = []
    for on_device in {int(layers[DEVICE] + _ROUNDING), max(int(layers[DEVICE] + _ROUNDING) - 1, 0)}:
        left = n - on_device
        if layers[DISK] <= _ROUNDING:
            counts = [left]
        else:
            counts = [min(int(layers[HOST] + more + _ROUNDING), left) for more in (0, 1)]
        found += [
            {f"{kind} {DEVICE}": on_device / n, f"{kind} {HOST}": host / n, f"{kind} {DISK}": (left - host) / n}
            for host in counts
        ]
    return found
