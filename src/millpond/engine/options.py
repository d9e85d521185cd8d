"""Types of `**options`, written by docs/generate.py; edit the dataclasses of the settings instead."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import Any, TypedDict

import torch

from millpond.budget import Budget
from millpond.cache.chunks.store import ChunkStore
from millpond.codec import CodecSpec
from millpond.engine.offload.machine import MachineConstants
from millpond.engine.offload.plan import Plan
from millpond.engine.settings import OnPressure, Overflow, Preemption
from millpond.hf.calibration.load import CalibrationSource
from millpond.hf.fit import FitSource
from millpond.hf.text_storage import TransformSource
from millpond.models.weights.streamed import Verify
from millpond.runner.runner_choice import Runner


class EngineOptions(TypedDict, total=False):
    """Fields of `EngineConfig`."""

    method: str | None
    options: Mapping[str, Any]
    budget: Budget | str | int | float | None
    codec: CodecSpec | None
    calibration: CalibrationSource | TransformSource
    storage_codec: str | None
    storage_delay_s: float
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
    preemption: Preemption
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


class LLMOptions(EngineOptions, total=False):
    """The same, and how a model is loaded."""

    tokenizer: Any
    image_processor: Any
    dtype: str | torch.dtype | None
    threads: int | None
    memory: str | int | None
    disk: str | PathLike[str] | None
    plan: Plan | str | PathLike[str] | None
    prompt_tokens: int | None
    new_tokens: int | None
    machine: MachineConstants | None
    verify: Verify
    device: str | None
    device_memory: str | int | None


class ClusterOptions(EngineOptions, total=False):
    """The same, and the workers of a cluster."""

    replicas: int | None
    prefill: int | None
    decode: int | None
    address: str | None
    max_replays: int
    hang_s: float
    handoff_memory: str | int
    lease_s: float
    checkpoint_tokens: int | None
    replan_s: float | None
