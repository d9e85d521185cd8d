"""KV on a device, in the host's memory and on a disk: the tokens of the model in memory, and tiers keep their caps."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from millpond.cache.pages.tier_limits import TierLimits
from millpond.cache.state.positions import PositionTracker
from millpond.engine.config import EngineConfig
from millpond.engine.engine import Engine
from millpond.engine.offload.open import Opened, open_in_memory
from millpond.engine.offload.plan import Plan
from millpond.errors import BudgetError, OptionError
from millpond.models.load import load_model
from millpond.tiers.cuda import CudaDevice
from millpond.tiers.devices import Device, SimulatedDevice
from tests.engine.offload.on_tiers import CAP, CPU, HOST_CAP, engine_of, fake_cuda, opened, plan_of, simulated
from tests.engine.test_offload import answers, in_memory, options
from tests.helpers.hf.families import family
from tests.helpers.tiers.fake_cuda import FakeCuda

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

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


DEVICES = [simulated, fake_cuda]


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


@pytest.mark.parametrize(("codes", "make"), [("int8", simulated), ("int4", fake_cuda)])
def test_codes_of_weights_go_to_the_device(codes: str, make: Any, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    family("llama").make(num_hidden_layers=5, hidden_size=128, intermediate_size=64).save_pretrained(folder)
    plan, config = plan_of({"device": 0.4, "host": 0.6}, weights=WEIGHTS[1]), {"weights": codes}
    on_host = open_in_memory(folder, None, Plan(prompt_rows=64), None, options_with(config), disk=tmp_path)
    expected = Engine(on_host.model, None, on_host.config, streamed=on_host.streamed)
    right = answers(expected)
    expected.close()
    assert len(set(right)) > 5
    found = opened(folder, plan, make(2 * CAP), config=config, disk=tmp_path)
    engine = engine_of(found)
    assert answers(engine) == right
    plain = opened(folder, plan, make(2 * CAP))
    slots = [one.ledger.by_purpose("device")["slots"] for one in (found, plain)]
    assert slots[0] < 0.5 * slots[1]
    for one in (engine, engine_of(plain)):
        one.close()


def options_with(config: dict[str, Any]) -> EngineConfig:
    return EngineConfig(**options("full") | {"max_step_tokens": 64} | config)


def kv_bytes(found: Opened) -> dict[str, int]:
    """Return the bytes that each side has for KV."""
    assert found.host_kv is not None
    limits = found.host_kv.limits
    return {"device": limits.near.limit_bytes or 0, "host": limits.far.limit_bytes or 0}


@pytest.mark.parametrize(
    ("kv", "nbytes"), [({"device": 0.4, "host": 0.6}, 1 << 20), ({"device": 0.8, "disk": 0.2}, 3 << 19)], ids=str
)
def test_each_side_keeps_its_cap_where_little_fits(kv: dict[str, float], nbytes: int, folders: dict[str, Path]) -> None:
    """With room for two or three of nine sequences requests wait or are preempted, and no side takes more."""
    found = opened(folders["llama"], plan_of(kv), simulated(), config={"kv_memory": nbytes})
    given = kv_bytes(found)
    assert sum(given.values()) == nbytes
    assert found.ledger.by_purpose("device")["kv"] == given["device"]
    assert found.ledger.by_purpose("host")["kv"] == given["host"]
    engine = engine_of(found)
    most = {"device": 0, "host": 0}
    limits = found.host_kv.limits  # type: ignore[union-attr]
    step = engine.step

    def watched() -> Any:
        outputs = step()
        most["device"], most["host"] = max(most["device"], limits.near.nbytes), max(most["host"], limits.far.nbytes)
        return outputs

    engine.step = watched  # type: ignore[method-assign]
    assert answers(engine) == in_memory("llama", "full")
    assert 0 < most["device"] <= given["device"]
    assert 0 < most["host"] <= given["host"]
    engine.check_integrity()
    engine.close()


def test_a_request_that_one_side_cannot_hold_is_refused(folders: dict[str, Path]) -> None:
    found = opened(folders["llama"], plan_of({"device": 0.2, "host": 0.8}), simulated(), config={"kv_memory": 400_000})
    engine = engine_of(found)
    assert any(isinstance(one, BudgetError) for one in answers_or_refusals(engine))
    engine.close()


def answers_or_refusals(engine: Engine) -> list[Any]:
    try:
        return answers(engine)
    except BudgetError as error:
        return [error]


def test_too_little_of_one_side(folders: dict[str, Path]) -> None:
    with pytest.raises(BudgetError, match="that device_memory leaves for KV"):
        opened(folders["llama"], plan_of({"device": 0.4, "host": 0.6}), simulated(), config={"kv_memory": 60 << 20})
    with pytest.raises(BudgetError, match=r"takes .* bytes of the tier 'host'"):
        opened(folders["llama"], plan_of({"device": 0.4, "host": 0.6}), simulated(), memory=100_000)


@pytest.mark.parametrize("method", ["streaming", "infllm"])
def test_methods_that_read_what_the_device_has_need_kv_there(method: str, folders: dict[str, Path]) -> None:
    found = opened(folders["llama"], plan_of({"device": 0.4, "host": 0.6}), simulated(), method)
    with pytest.raises(OptionError, match="which are on the device; keep KV there"):
        engine_of(found)


def test_a_link_with_a_bandwidth_takes_its_time() -> None:
    slept: list[float] = []
    device = SimulatedDevice(bytes_per_s=1e6, sleep=slept.append)
    source = torch.arange(1 << 18, dtype=torch.float32)
    (here,) = device.down(source)
    there = device.up(here)
    assert bool((there == source).all())
    assert there.data_ptr() != here.data_ptr() != source.data_ptr()
    assert (device.bytes_down, device.bytes_copied) == (1 << 20, 1 << 20)
    assert all(0.5 < one <= 1.05 for one in slept)
    assert len(slept) == 2
    device.close()


def test_tensors_pass_pinned_memory_of_a_gpu_in_order() -> None:
    cuda = FakeCuda()
    device = CudaDevice(CPU, cuda=cuda)
    small, large = torch.arange(7, dtype=torch.float16), torch.randn(3, 1 << 18)
    here = device.down(small, large.t())
    assert torch.equal(here[0], small)
    assert torch.equal(here[1], large.t())
    assert cuda.log[-2:] == ["record main", "synchronize"], "the host waits for the copies of one call together"
    assert torch.equal(device.up(large), large)
    assert len(cuda.pinned) == 2, "the memory of each way is pinned once"
    again = device.up(small)
    assert cuda.log[-2:] == ["synchronize", "record main"], "the copy before has left the pinned memory"
    assert torch.equal(again, small)
    device.close()
    assert not cuda.pinned


def test_limits_of_two_tiers_scale_needs_to_the_fuller_one() -> None:
    both = TierLimits(100, 300)
    assert (both.limit_bytes, both.scaled(50, 30), both.scaled(10, 150)) == (400, 200, 200)
    assert both.scaled(101, 0) > 400
    assert TierLimits(None, 300).scaled(10**9, 150) == 150
    assert TierLimits(0, 300).scaled(1, 1) > 300
    assert TierLimits(0, 300).scaled(0, 300) == 300
    assert TierLimits(None, None).limit_bytes is None


def test_positions_are_on_the_side_of_each_layer() -> None:
    """Layers of one pass share it, and each gets its positions where it attends, whichever is first."""
    meta = torch.device("meta")
    for first, other in ((CPU, meta), (meta, CPU)):
        tracker = PositionTracker()
        tracker.span(0, 3, 2, None, first)
        spans = {device: tracker.span(3, 1, 2, None, device) for device in (first, other, first)}
        assert {device.type: span.q_pos.device.type for device, span in spans.items()} == {"cpu": "cpu", "meta": "meta"}
        assert spans[CPU].q_pos.tolist() == [3, 3]
        assert tracker.span(3, 1, 2, None, other) is spans[other]
        assert tracker.span(4, 2, 2, None, other).positions(1).device == other
        assert tracker.span(4, 2, 2, None, first).positions(1).device == first
        assert tracker.seen.tolist() == [6, 6]
