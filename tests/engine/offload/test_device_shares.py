"""Plans for a device: all six shares of weights and KV come from the linear program, and are run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from millpond.engine.config import EngineConfig
from millpond.engine.offload.cost import BlockShape, CostModel
from millpond.engine.offload.device_search import best_shares
from millpond.engine.offload.kv_size import kv_size
from millpond.engine.offload.machine import Accelerator
from millpond.engine.offload.model_size import model_size
from millpond.engine.offload.open import Opened
from millpond.engine.offload.open_on_device import ON_DEVICE, open_on_device
from millpond.engine.offload.planner import EXAMPLE, Workload
from millpond.engine.offload.search import Limits, fits
from millpond.errors import BudgetError
from millpond.tiers.cuda import Bandwidths, CudaDevice
from tests.engine.offload.on_tiers import CPU, engine_of
from tests.engine.test_offload import answers, in_memory, options
from tests.helpers.hf.families import family
from tests.helpers.tiers.fake_cuda import FakeCuda

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

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


@pytest.mark.slow
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
    """The same memory has KV on the host for H2O, and on the device for what cannot attend elsewhere."""
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
