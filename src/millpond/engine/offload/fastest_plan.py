"""Choice of the fastest plan for a model that does not fit in the memory that it is opened with."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from millpond.engine.config import EngineConfig
from millpond.engine.offload.capabilities import ENGINE, Capabilities
from millpond.engine.offload.cost import CostModel
from millpond.engine.offload.kv_size import KVSize, kv_size, planned
from millpond.engine.offload.machine import MachineConstants
from millpond.engine.offload.model_size import ModelSize
from millpond.engine.offload.plan import HOST, Plan
from millpond.engine.offload.planner import constants_for, kv_that_fits
from millpond.engine.offload.search import Limits, search
from millpond.engine.offload.workload import Workload, usual
from millpond.errors import BudgetError
from millpond.models.weights.packed_file import Report


def fastest_plan(
    size: ModelSize,
    config: EngineConfig,
    memory: int,
    disk: Path | None,
    machine: MachineConstants | None,
    workload: Workload | None,
    report: Report | None = None,
    *,
    can: Capabilities = ENGINE,
    verified: bool = False,
) -> tuple[Plan, Workload]:
    """The fastest plan inside `memory` bytes, and the workload that it was made for.

    Layers that do not stay are read from the model's own folder, so it needs no `disk`; KV goes to a disk only with
    one. Sequences, prompt tokens of a sweep and KV are at most those of `config`.

    Args:
        machine: constants; None: measured once and kept. workload: None for the longest of `usual` that fits.
        can: what the plan may use.
        verified: all that is read is compared with its checksum, so embeddings and head, of which parts are read, stay
            in memory.

    Raises:
        BudgetError: less memory than the smallest that runs. OptionError: a workload beyond the model's context, or the
            machine cannot be measured.
    """
    limits = Limits(memory=memory, sequences=config.max_running, prompt_rows=config.max_step_tokens, kv=config.kv_limit)
    can = _within(can, None if config.prefix_cache else disk)  # the prefix cache holds pages in memory
    if verified:
        can = replace(can, ends=("host",))
    if workload is not None:
        workload.check_context(size.context)
        kv = _kv_that_fits(size, config, workload, limits, can)
    else:
        workload, kv = _longest(size, config, limits, can)
    if machine is None:
        machine = constants_for(size.folder, disk, report=report)
    return search(CostModel(size, kv, machine), limits, can), workload


def _longest(size: ModelSize, config: EngineConfig, limits: Limits, can: Capabilities) -> tuple[Workload, KVSize]:
    """The longest usual workload that fits, and its KV.

    Raises:
        BudgetError: none fits.
    """
    for workload in usual(size.context):
        try:
            return workload, _kv_that_fits(size, config, workload, limits, can)
        except BudgetError as error:
            refused = error
    raise refused


def _kv_that_fits(
    size: ModelSize, config: EngineConfig, workload: Workload, limits: Limits, can: Capabilities
) -> KVSize:
    """The cache of a sequence.

    Raises:
        BudgetError: less memory than the smallest that runs.
    """
    how = planned(config)

    def kv(memory: int) -> KVSize:
        return kv_size(size, workload.prompt, workload.new, **how, memory=memory)

    return kv_that_fits(size, kv, limits, can)


def _within(can: Capabilities, disk: Path | None) -> Capabilities:
    """What may be chosen of `can`: KV stays in memory without a folder for it, or without the program for its share."""
    if disk is not None and find_spec("scipy") is not None:
        return can
    return replace(can, kv=tuple(tier for tier in can.kv if tier == HOST))
