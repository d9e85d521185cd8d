"""KV on a device, in the host's memory and on a disk: the tokens of the model in memory, and tiers keep their caps."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from millpond.cache.attention.sparse_values import SparseValues
from millpond.cache.entries.read_write import append
from millpond.cache.pages.page_table import PageTable
from millpond.cache.pages.pool import PagePool
from millpond.cache.pages.tier_limits import TierLimits
from millpond.cache.state.positions import PositionTracker
from millpond.engine.config import EngineConfig
from millpond.engine.engine import Engine
from millpond.engine.offload.cost import BlockShape, CostModel
from millpond.engine.offload.device_search import best_shares
from millpond.engine.offload.kv_size import kv_size
from millpond.engine.offload.machine import Accelerator
from millpond.engine.offload.model_size import model_size
from millpond.engine.offload.open import Opened, open_in_memory
from millpond.engine.offload.open_on_device import ON_DEVICE, open_on_device
from millpond.engine.offload.plan import Plan
from millpond.engine.offload.planner import EXAMPLE, Workload
from millpond.engine.offload.search import Limits, fits
from millpond.errors import BudgetError, OptionError
from millpond.kernels.args import AttentionShape
from millpond.models.load import load_model
from millpond.tiers.cuda import Bandwidths, CudaDevice
from millpond.tiers.devices import Device, SimulatedDevice
from tests.engine.test_offload import answers, in_memory, options
from tests.helpers.hf.families import family
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


def simulated(capacity: int = CAP) -> Device:
    return SimulatedDevice(capacity)


def fake_cuda(capacity: int = CAP) -> Device:
    return CudaDevice(CPU, capacity, cuda=FakeCuda())


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


FAST = Bandwidths(link=1e9, memory=1e11, flops=1e12)


class MeasuredDevice(CudaDevice):
    """A device whose speeds are given."""

    def measure(self) -> Bandwidths:
        return FAST


def searched(folder: Path, capacity: int, memory: int, **more: Any) -> Opened:
    device = MeasuredDevice(CPU, capacity, cuda=FakeCuda())
    config = EngineConfig(**options(more.pop("method", "full")) | {"max_step_tokens": 64} | more.pop("config", {}))
    given = {"machine": EXAMPLE, "workload": Workload(prompt=230, new=16), "device": device} | more
    return open_on_device(folder, CPU, capacity, memory, None, None, config, **given)


def test_all_six_shares_come_from_the_linear_program(folders: dict[str, Path], tmp_path: Path) -> None:
    """With less memory of the device its shares fall, of both kinds, and with less of the host the disk's rise."""
    folder = folders["llama"]
    size = model_size(folder)
    roomy = searched(folder, 64 << 20, 64 << 20, disk=tmp_path)
    assert roomy.placement.plan.weights == {"device": 1.0}
    assert roomy.placement.plan.kv == {"device": 1.0}
    step = roomy.ledger.by_purpose("device")
    ends = size.end_bytes + step["activations"] + step["logits"]
    roomy.streamed.close()  # type: ignore[union-attr]
    used: set[tuple[str, str]] = set()
    for more in (0.3, 0.6, 1.0):
        for memory in (10 << 20, 12 << 20, 64 << 20):
            capacity = int(ends + 2 * size.slot_bytes + more * size.layer_bytes)
            try:
                found = searched(folder, capacity, memory, disk=tmp_path)
            except BudgetError:
                continue
            plan = found.placement.plan
            used |= {("weights", tier) for tier in plan.weights} | {("kv", tier) for tier in plan.kv if plan.kv[tier]}
            assert found.ledger.peak("device") <= capacity
            assert found.ledger.peak("host") <= memory
            assert plan.prediction is not None
            assert sum(plan.prediction.bytes["device"].values()) <= capacity
            assert sum(plan.prediction.bytes["host"].values()) <= memory
            assert "their KV: " in str(found.placement)
            engine = engine_of(found)
            assert answers(engine) == in_memory("llama", "full")
            engine.close()
    assert used == {(kind, tier) for kind in ("weights", "kv") for tier in ("device", "host", "disk")} - {
        ("kv", "disk")
    }


def test_a_plan_keeps_kv_on_the_device_for_who_needs_it_there(folders: dict[str, Path], tmp_path: Path) -> None:
    """The same memory has KV on the host for H2O; methods and settings that cannot attend there keep it on the device."""
    size = model_size(folders["llama"])
    capacity = size.end_bytes + 2 * size.slot_bytes + size.layer_bytes // 2 + (3 << 19)
    for more, alone in (
        ({"method": "h2o"}, False),
        ({"method": "streaming"}, True),
        ({"config": {"prefix_cache": "lru"}}, True),
        ({"config": {"method": None, "budget": None}}, False),
    ):
        found = searched(folders["llama"], capacity, 64 << 20, disk=tmp_path, **more)
        assert (found.placement.plan.kv == {"device": 1.0}) == alone
        assert (found.host_kv is None) == alone
        engine_of(found).close()


def test_kv_goes_to_a_disk_where_neither_side_holds_it(tmp_path: Path) -> None:
    """With room for a quarter of its KV on each side some goes to a disk; with room for all of it none does."""
    pytest.importorskip("scipy")
    family("llama").make(num_hidden_layers=24, max_position_embeddings=2048).save_pretrained(tmp_path)
    size = model_size(tmp_path)
    machine = replace(EXAMPLE, accelerator=Accelerator(flops=1e12, memory_per_s=1e11, link_per_s=1e9))
    cost = CostModel(size, kv_size(size, 1024, 512, method="full"), machine)
    block = BlockShape(sequences=64, micro_batch=8, prompt_rows=64, slots=2)
    whole = 64 * cost.kv.held
    ends = {tier: sum(term.constant for term in terms) for tier, terms in cost.bytes(block).items()}
    found = {}
    for part in (4, 1):
        room = {tier: int(ends[tier] + size.layer_bytes + whole / part) for tier in ("device", "host")}
        windows = sum(term.with_disk for term in cost.bytes(block)["host"]) * (part > 1)
        limits = Limits(device_memory=room["device"], memory=room["host"] + int(windows))
        shares = best_shares(cost, block, limits, ON_DEVICE)
        assert shares is not None
        assert fits(cost.bytes(block), shares, limits)
        assert sum(shares.values()) == pytest.approx(2)
        found[part] = shares
    assert found[4]["kv disk"] > 0.3 > found[1]["kv disk"] == 0
    assert found[4]["kv device"] < found[1]["kv device"]
    n = len(size.layers)
    assert all(share * n == pytest.approx(round(share * n)) for share in found[4].values())


HALF = {"device": 0.4, "host": 0.6}


def with_values(folder: Path, values: float, **config: Any) -> tuple[list[Any], int]:
    """Return answers, and the bytes of keys and values that steps on the host read sparsely."""
    found = opened(folder, replace(plan_of(HALF), values=values), simulated(), config=config)
    engine = engine_of(found)
    tokens = answers(engine)
    engine.check_integrity()
    engine.close()
    assert found.host_kv is not None
    return tokens, 0 if found.host_kv.sparse is None else found.host_kv.sparse.bytes_read


def test_sparse_values_read_all_keys_and_the_share_of_values(folders: dict[str, Path]) -> None:
    """Bytes are K + p V; with p = 1 the step is the dense one, and with nearly all values the tokens are the same."""
    assert with_values(folders["llama"], 1.0) == (in_memory("llama", "full"), 0)
    tokens, nearly_all = with_values(folders["llama"], 0.9999)
    assert tokens == in_memory("llama", "full")
    tokens, some = with_values(folders["llama"], 0.05)
    keys = nearly_all / 2
    steps = 9 * len(tokens)  # of three layers, four KV heads at most, each share rounded up
    assert 0 <= some - keys * 1.05 <= steps * 3 * 4 * 64 * 4
    assert tokens != in_memory("llama", "full")


@pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
def test_sparse_values_are_those_of_the_largest_weights(share: float) -> None:
    pool = PagePool(8, 8, torch.float32, CPU, slots=4)
    table, lens = PageTable(pool, 2, 2), [5, 9]
    rng = torch.Generator().manual_seed(0)
    entries = [tuple(torch.randn(2, n, 8, generator=rng) for _ in "kv") for n in lens]
    for sequence, (k, v) in enumerate(entries):
        append(table, sequence, k, v, torch.arange(k.shape[1], dtype=torch.int32))
    q, k, v = (torch.randn(2, h, 8, generator=rng) for h in (4, 2, 2))
    table.make_room(True, 1)
    out, lse = SparseValues(share).step(table, AttentionShape(0.3), q, k, v, torch.tensor(lens, dtype=torch.int32))
    for s, (past_k, past_v) in enumerate(entries):
        keys, values = torch.cat([past_k, k[s][:, None]], 1), torch.cat([past_v, v[s][:, None]], 1)
        logits = q[s].view(2, 2, 8) @ keys.transpose(1, 2) * 0.3
        p = logits.softmax(-1)
        n = -(-round(p.shape[-1] * share * 1000) // 1000)
        for head in range(2):
            kept = p[head].sum(0).argsort(descending=True)[:n]
            expected = p[head][:, kept] @ values[head, kept]
            torch.testing.assert_close(out[s].view(2, 2, 8)[head], expected)
        torch.testing.assert_close(lse[s].view(2, 2), logits.logsumexp(-1))


def test_where_values_cannot_be_sparse(folders: dict[str, Path]) -> None:
    for kv in ({"host": 1.0}, {"device": 0.5, "disk": 0.5}):
        with pytest.raises(OptionError, match="entries in the memory of a device's host"):
            Plan(kv=kv, values=0.1)
    for value in (0, 1.5, True, "all"):
        with pytest.raises(OptionError, match="must be a share above 0 and at most 1"):
            Plan(kv=HALF, values=value)  # type: ignore[arg-type]
    for method, codec in (("h2o", "auto"), ("full", "int4")):
        found = opened(
            folders["llama"], replace(plan_of(HALF), values=0.1), simulated(), method, config={"codec": codec}
        )
        with pytest.raises(OptionError, match="reads some values of plain entries that all stay"):
            engine_of(found)


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
