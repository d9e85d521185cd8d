"""Models that an accelerator holds in part, with fake streams: tokens, bytes, plans and errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import millpond as mp
from millpond.engine.config import EngineConfig
from millpond.engine.engine import Engine
from millpond.engine.offload import open_on_device as opening
from millpond.engine.offload.graph_memory import recorded_bytes, records
from millpond.engine.offload.model_size import model_size
from millpond.engine.offload.open import Opened
from millpond.engine.offload.open_on_device import device_plan, open_on_device
from millpond.engine.offload.plan import Plan
from millpond.engine.offload.planner import Workload
from millpond.errors import BudgetError, OptionError
from millpond.tiers.cuda import Bandwidths, CudaDevice
from tests.engine.test_offload import FAMILIES, answers, in_memory, options
from tests.helpers.tiers.fake_cuda import FakeCuda

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

CPU = torch.device("cpu")
SPEED = Bandwidths(link=1e9, memory=1e11)


def opened(folder: Path, capacity: int | None, **more: Any) -> tuple[Opened, CudaDevice]:
    device = CudaDevice(CPU, capacity, cuda=FakeCuda())
    config = EngineConfig(**options("h2o"))
    given = {"memory": None, "plan": None, "dtype": None, "config": config} | more
    return open_on_device(folder, CPU, capacity, device=device, **given), device


def engine_of(found: Opened) -> Engine:
    return Engine(found.model, None, found.config, streamed=found.streamed, tier=found.tier, host_kv=found.host_kv)


@pytest.mark.covering
@pytest.mark.parametrize(
    "weights", [{"device": 1.0}, {"device": 0.4, "host": 0.6}, {"host": 0.5, "disk": 0.5}], ids=str
)
@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_are_those_of_the_model_in_memory(
    name: str, weights: dict[str, float], folders: dict[str, Path]
) -> None:
    found, device = opened(folders[name], 16 << 20, plan=Plan(weights=weights, prompt_rows=256))
    copied = device.bytes_copied
    engine = engine_of(found)
    assert answers(engine) == in_memory(name, "h2o")
    assert (device.bytes_copied > copied) == (weights.get("device", 0) < 1)
    assert found.ledger.peak("device") <= 16 << 20
    assert found.placement.bytes["device"]["kv"] > 0
    engine.close()


def test_a_plan_is_made_that_fits(folders: dict[str, Path]) -> None:
    size = model_size(folders["llama"])
    tight = size.n_bytes // 2 + (8 << 20)
    found, _ = opened(folders["llama"], tight, workload=Workload(prompt=32, new=16))
    assert found.ledger.peak("device") <= tight
    assert "tokens per second" in str(found.placement)
    assert answers(engine_of(found)) == in_memory("llama", "h2o")


def test_more_memory_keeps_more_layers_and_sequences(folders: dict[str, Path]) -> None:
    size, config = model_size(folders["llama"]), EngineConfig(max_running=4, max_step_tokens=64)
    work = Workload(prompt=32, new=16)
    large = device_plan(size, config, 1 << 30, None, SPEED, work)
    assert large.plan.weights == {"device": 1.0}
    assert large.sequences == 4
    small = size.n_bytes + (1 << 20)
    while (found := device_plan(size, config, small, None, SPEED, work)).plan.weights == {"device": 1.0}:
        small -= 10_000
    assert found.tokens_per_s < large.tokens_per_s
    limited = device_plan(size, config, small, size.layers[0].n_bytes, SPEED, work)
    assert limited.plan.share("weights", "host") <= 1 / len(size.layers)


def test_recorded_steps_count(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all layers stay on a device whose steps are recorded, graphs take what KV would have."""
    size, work = model_size(folders["llama"]), Workload(prompt=32, new=16)
    config = EngineConfig(max_running=4, max_step_tokens=64)
    graphs = recorded_bytes(size, config, work)
    assert graphs < recorded_bytes(size, EngineConfig(max_running=5, max_step_tokens=64), work)
    assert graphs < recorded_bytes(size, config, Workload(prompt=32, new=16_000))
    least = size.n_bytes + (1 << 20)
    while device_plan(size, config, least, None, SPEED, work).plan.weights == {"device": 1.0}:
        least -= 10_000
    least += 10_000
    assert device_plan(size, config, least, None, SPEED, work, recorded=True).plan.weights != {"device": 1.0}
    more = least + graphs
    assert device_plan(size, config, more, None, SPEED, work, recorded=True).plan.weights == {"device": 1.0}
    assert not records(CPU)
    plan = Plan(weights={"device": 1.0}, prompt_rows=256)
    without, _ = opened(folders["llama"], 64 << 20, plan=plan)
    monkeypatch.setattr(opening, "records", lambda device: True)
    found, _ = opened(folders["llama"], 64 << 20, plan=plan)
    taken, before = (one.placement.bytes["device"] for one in (found, without))
    assert taken["graphs"] == recorded_bytes(size, EngineConfig(**options("h2o")), Workload())
    assert taken["kv"] == before["kv"] - taken["graphs"]
    streamed, _ = opened(folders["llama"], 64 << 20, plan=Plan(weights={"device": 0.4, "host": 0.6}, prompt_rows=256))
    assert "graphs" not in streamed.placement.bytes["device"]
    for one in (without, found, streamed):
        engine_of(one).close()


def test_too_little_memory(folders: dict[str, Path]) -> None:
    with pytest.raises(BudgetError, match="device_memory=1,000,000 bytes is less than the smallest that runs"):
        opened(folders["llama"], 1_000_000)
    with pytest.raises(BudgetError, match="device_memory leaves for KV"):
        opened(
            folders["llama"],
            16 << 20,
            plan=Plan(weights={"device": 1.0}),
            config=EngineConfig(**options("h2o") | {"kv_memory": 1 << 30}),
        )


def test_what_a_device_does_not_run(folders: dict[str, Path]) -> None:
    with pytest.raises(OptionError, match="weights='int4' with memory= or plan=: packed weights are kept in a file"):
        opened(folders["llama"], 16 << 20, config=EngineConfig(weights="int4"))
    with pytest.raises(OptionError, match="prefix_cache='lru' needs all keys and values in one memory"):
        engine_of(
            opened(
                folders["llama"],
                16 << 20,
                plan=Plan(kv={"device": 0.4, "host": 0.6}),
                config=EngineConfig(**options("full") | {"prefix_cache": "lru"}),
            )[0]
        )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"device_memory": "1GiB"}, "device_memory='1GiB' is memory of an accelerator"),
        ({"device_memory": "1GiB", "device": "cpu"}, "and device='cpu' is not one"),
        ({"memory": "1GiB", "device": "cuda"}, "needs device_memory="),
        ({"device_memory": "1GiB", "device": "cuda", "machine": "."}, "machine= is for a plan inside"),
        ({"device": "gpu0"}, "device='gpu0'"),
        ({"device": "mps", "device_memory": "1GiB"}, "are for 'cuda' devices and the CPU"),
        ({"device": "cuda:77"}, "device='cuda:77': torch cannot use it here"),
        ({"device": "cuda:77", "device_memory": "1GiB"}, "device='cuda:77': torch cannot use it here"),
    ],
)
def test_arguments_that_do_not_go_together(given: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        mp.LLM("pond-recall", **given)


def test_a_loaded_model_is_moved_by_its_owner() -> None:
    with pytest.raises(OptionError, match="move a loaded one itself"):
        mp.LLM(mp.load_model("pond-recall"), device="cpu")
