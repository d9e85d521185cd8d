"""Weights on a simulated device, in the host's memory and on a disk give the tokens of the model in memory."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from millpond.engine.config import EngineConfig
from millpond.engine.engine import Engine
from millpond.engine.offload.open import Opened, open_in_memory
from millpond.engine.offload.plan import Plan
from millpond.errors import BudgetError, DataError, OptionError
from millpond.tiers.devices import SimulatedDevice
from tests.engine.test_offload import FAMILIES, answers, in_memory, options
from tests.helpers.tiers.backends import FaultyFile, ShuffledBackend

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

SHARES = [
    {"device": 1.0},
    {"device": 0.4, "host": 0.6},
    {"device": 0.2, "disk": 0.8},
    {"device": 0.2, "host": 0.4, "disk": 0.4},
    {"host": 1.0},
    {"disk": 1.0},
]


def opened(folder: Path, weights: dict[str, float], device: SimulatedDevice, **more: Any) -> Opened:
    kv = more.pop("kv", {"host": 1.0})
    plan = Plan(weights=weights, kv=kv, slots=2, prompt_rows=256)
    config = EngineConfig(**options("h2o"))
    return open_in_memory(folder, "16MiB", plan, None, config, device=device, **more)


def engine_of(found: Opened) -> Engine:
    return Engine(found.model, None, found.config, streamed=found.streamed, tier=found.tier)


@pytest.mark.parametrize("weights", SHARES, ids=str)
def test_tokens_are_those_of_the_model_in_memory(weights: dict[str, float], folders: dict[str, Path]) -> None:
    device = SimulatedDevice(2 << 20)
    found = opened(folders["llama"], weights, device)
    engine = engine_of(found)
    copied, (read, expected) = device.bytes_copied, (found.streamed.bytes_read, in_memory("llama", "h2o"))
    assert answers(engine) == expected
    assert (device.bytes_copied > copied) == (weights.get("device", 0) < 1), "what is not there is copied in each sweep"
    assert (found.streamed.bytes_read > read) == (weights.get("disk", 0) > 0)
    assert 0 < found.ledger.peak("device") <= 2 << 20
    engine.close()
    assert found.ledger.used("device") == 0


@pytest.mark.parametrize("name", FAMILIES[1:])
def test_with_kv_on_a_disk_and_copies_in_any_order(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    device = SimulatedDevice(bytes_per_s=1e9, backend=ShuffledBackend(1, most_s=0.0005))
    weights = {"device": 0.2, "host": 0.4, "disk": 0.4}
    found = opened(folders[name], weights, device, kv={"disk": 1.0}, disk=tmp_path, backend=ShuffledBackend(0))
    engine = engine_of(found)
    assert answers(engine) == in_memory(name, "h2o")
    engine.close()


def test_a_device_that_is_too_small(folders: dict[str, Path]) -> None:
    with pytest.raises(BudgetError, match="the tier 'device', which has 100,000 free"):
        opened(folders["llama"], {"device": 1.0}, SimulatedDevice(100_000))


def test_what_lies_where_is_shown(folders: dict[str, Path]) -> None:
    found = opened(folders["llama"], {"device": 0.2, "host": 0.4, "disk": 0.4}, SimulatedDevice())
    assert list(found.placement.bytes) == ["device", "host", "disk"]
    assert found.placement.bytes["device"]["weights"] > 0
    assert found.placement.bytes["device"]["slots"] > 0
    engine_of(found).close()


def test_nobody_gets_one_by_accident(folders: dict[str, Path]) -> None:
    with pytest.raises(OptionError, match="no accelerator is used"):
        open_in_memory(folders["llama"], None, Plan(weights={"device": 1.0}), None, EngineConfig())


def test_a_read_that_fails_on_its_way_to_the_device(folders: dict[str, Path]) -> None:
    FaultyFile.fault, FaultyFile.times = None, 0
    found = opened(folders["llama"], {"disk": 1.0}, SimulatedDevice(), open_file=FaultyFile)
    engine = engine_of(found)
    FaultyFile.fault, FaultyFile.times = OSError(5, "Input/output error"), 8
    failed = [one for one in answers(engine) if isinstance(one, Exception)]
    FaultyFile.fault = None
    assert failed
    assert all(isinstance(one, DataError) for one in failed)
    assert answers(engine) == in_memory("llama", "h2o")
    engine.close()


def test_copies_take_the_time_of_their_bandwidth() -> None:
    from millpond.tiers.buffers import Slot, aligned_buffer

    slept: list[float] = []
    device = SimulatedDevice(bytes_per_s=1e6, sleep=slept.append)
    source, slot = aligned_buffer(1 << 20), Slot(aligned_buffer(1 << 20))
    source[:] = 7
    began = time.perf_counter()
    assert device.copy(source, slot).finish() is None
    took = time.perf_counter() - began
    assert bool((slot.data == 7).all())
    assert 1.048576 - took <= slept[0] <= 1.048576
    device.close()
