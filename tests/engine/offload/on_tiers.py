"""Engines of a small model on a simulated device or through fake streams, with KV on several tiers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from millpond.engine.config import EngineConfig
from millpond.engine.engine import Engine
from millpond.engine.offload.open import Opened
from millpond.engine.offload.open_on_device import open_on_device
from millpond.engine.offload.plan import Plan
from millpond.tiers.cuda import CudaDevice
from millpond.tiers.devices import Device, SimulatedDevice
from tests.engine.test_offload import options
from tests.helpers.tiers.fake_cuda import FakeCuda

CPU = torch.device("cpu")
CAP, HOST_CAP = 16 << 20, 32 << 20


def opened(folder: Path, plan: Plan, device: Device, method: str = "full", **more: Any) -> Opened:
    config = EngineConfig(**options(method) | {"max_step_tokens": 64} | more.pop("config", {}))
    return open_on_device(folder, CPU, CAP, more.pop("memory", HOST_CAP), plan, None, config, device=device, **more)


def engine_of(found: Opened) -> Engine:
    return Engine(found.model, None, found.config, streamed=found.streamed, tier=found.tier, host_kv=found.host_kv)


def simulated(capacity: int = CAP) -> Device:
    return SimulatedDevice(capacity)


def fake_cuda(capacity: int = CAP) -> Device:
    return CudaDevice(CPU, capacity, cuda=FakeCuda())


def plan_of(kv: dict[str, float], schedule: Any = "zigzag", weights: dict[str, float] | None = None) -> Plan:
    return Plan(weights=weights or {"device": 1.0}, kv=kv, schedule=schedule, micro_batch=3, prompt_rows=64)
