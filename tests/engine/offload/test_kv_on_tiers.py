"""KV on a device, in the host's memory and on a disk: the tokens of the model in memory, and tiers keep their caps."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from millpond.engine.config import EngineConfig
from millpond.engine.engine import Engine
from millpond.engine.offload.open import Opened
from millpond.engine.offload.open_on_device import open_on_device
from millpond.engine.offload.plan import Plan
from millpond.models.load import load_model
from millpond.tiers.cuda import CudaDevice
from millpond.tiers.devices import Device, SimulatedDevice
from tests.engine.test_offload import answers, in_memory, options
from tests.helpers.tiers.fake_cuda import FakeCuda

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

CPU = torch.device("cpu")
CAP, HOST_CAP = 16 << 20, 32 << 20
SHARES = [
    {"device": 1.0},
    {"device": 0.6, "host": 0.4},
    {"device": 0.4, "host": 0.2, "disk": 0.4},
    {"device": 0.6, "disk": 0.4},
    {"device": 0.0, "host": 1.0},
    {"host": 0.4, "disk": 0.6},
    {"disk": 1.0},
]
SCHEDULES = ["row", "zigzag", "diagonal"]
WEIGHTS = [{"device": 1.0}, {"device": 0.2, "host": 0.4, "disk": 0.4}]


def opened(folder: Path, plan: Plan, device: Device, method: str = "full", **more: Any) -> Opened:
    config = EngineConfig(**options(method) | {"max_step_tokens": 64} | more.pop("config", {}))
    return open_on_device(folder, CPU, CAP, more.pop("memory", HOST_CAP), plan, None, config, device=device, **more)


def engine_of(found: Opened) -> Engine:
    return Engine(found.model, None, found.config, streamed=found.streamed, tier=found.tier, host_kv=found.host_kv)


def simulated() -> Device:
    return SimulatedDevice(CAP)


def fake_cuda() -> Device:
    return CudaDevice(CPU, CAP, cuda=FakeCuda())


DEVICES = [simulated, fake_cuda]


def plan_of(kv: dict[str, float], schedule: Any = "zigzag", weights: dict[str, float] = WEIGHTS[0]) -> Plan:
    return Plan(weights=weights, kv=kv, schedule=schedule, micro_batch=3, prompt_rows=64)


def named(value: Any) -> str:
    return getattr(value, "__name__", str(value))


def product(quick: bool) -> list[Any]:
    """Return every placement x schedule x weights x device; or each placement once with some of the others."""
    every = [(kv, *rest) for kv in SHARES for rest in itertools.product(SCHEDULES, WEIGHTS, DEVICES)]
    picked = [every[len(every) // len(SHARES) * n + 5 * n % 12] for n in range(len(SHARES))]
    return picked if quick else [one for one in every if one not in picked]


def check_tokens(kv: Any, schedule: str, weights: Any, make: Callable[[], Device], folder: Path, disk: Path) -> None:
    device = make()
    found = opened(folder, plan_of(kv, schedule, weights), device, disk=disk)
    engine = engine_of(found)
    assert answers(engine) == in_memory("llama", "full")
    assert (device.bytes_down > 0) == (kv != {"device": 1.0}), "queries go down where entries are on the host"
    assert found.tier is None or found.tier.bytes_read > 0
    assert (found.tier is None) == ("disk" not in kv)
    engine.check_integrity()
    assert found.ledger.peak("device") <= CAP
    assert found.ledger.peak("host") <= HOST_CAP
    engine.close()


@pytest.mark.parametrize(("kv", "schedule", "weights", "make"), product(quick=True), ids=named)
def test_tokens_are_those_of_the_model_in_memory(
    kv: Any, schedule: str, weights: Any, make: Any, folders: dict[str, Path], tmp_path: Path
) -> None:
    check_tokens(kv, schedule, weights, make, folders["llama"], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("kv", "schedule", "weights", "make"), product(quick=False), ids=named)
def test_every_placement_and_schedule(
    kv: Any, schedule: str, weights: Any, make: Any, folders: dict[str, Path], tmp_path: Path
) -> None:
    check_tokens(kv, schedule, weights, make, folders["llama"], tmp_path)


@pytest.mark.parametrize("method", ["h2o", "snapkv"])
def test_methods_that_evict_and_codes(method: str, folders: dict[str, Path]) -> None:
    for codec in ("auto", "int4"):
        plan = plan_of({"device": 0.4, "host": 0.6})
        found = opened(folders["llama"], plan, simulated(), method, config={"codec": codec, "max_step_tokens": 256})
        engine = engine_of(found)
        wide = EngineConfig(**options(method, codec) | {"max_step_tokens": 64})
        expected = Engine(load_model(folders["llama"], "auto"), None, wide)
        assert answers(engine) == answers(expected)
        engine.close()
        expected.close()
