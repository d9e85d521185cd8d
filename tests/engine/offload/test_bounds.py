"""The lower bound of a block's time: never above what is found, and a search with it finds what one without it does."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import inf

import pytest

from millpond.engine.offload import search as searching
from millpond.engine.offload.cost import PLACES, BlockShape, CostModel
from millpond.engine.offload.kv_size import kv_size
from millpond.engine.offload.machine import Accelerator
from millpond.engine.offload.model_size import ModelSize, model_size
from millpond.engine.offload.plan import ENGINE, EVERYTHING, Capabilities
from millpond.engine.offload.planner import EXAMPLE
from millpond.engine.offload.search import Limits, min_memory, min_seconds, predicted, search, solve
from millpond.errors import BudgetError

MiB = 2**20


@pytest.fixture(scope="module")
def recall() -> ModelSize:
    return model_size("pond-recall")


def cost_of(model: ModelSize, method: str, codec: str, read_per_s: float) -> CostModel:
    kv = kv_size(model, 256, 64, memory=64 * MiB, method=method, budget=None if method == "full" else 64, codec=codec)
    return CostModel(model, kv, replace(EXAMPLE, read_per_s=read_per_s))


def may(can: Capabilities) -> set[str]:
    return {place for place in PLACES if place.split()[1] in (can.weights if "weights" in place else can.kv)}


@pytest.mark.covering
@pytest.mark.parametrize("device", [False, True])
@pytest.mark.parametrize("read_per_s", [1e6, 1e8, 3e9])
def test_no_block_takes_less_than_its_bound(recall: ModelSize, read_per_s: float, device: bool) -> None:
    pytest.importorskip("scipy")
    cost = cost_of(recall, "h2o", "auto", read_per_s)
    if device:
        link = Accelerator(flops=1e13, memory_per_s=3e11, link_per_s=1e9)
        cost = replace(cost, machine=replace(cost.machine, accelerator=link))
    can = EVERYTHING if device else ENGINE
    solved, tight = 0, 0
    for sequences, rows, more in product((1, 3, 16, 64), (16, 256), (0, 1, 6, 100)):
        block = BlockShape(sequences=sequences, micro_batch=min(8, sequences), prompt_rows=rows)
        limits = Limits(memory=min_memory(cost, can) + more * MiB, device_memory=(24 + more) * MiB if device else 0)
        room = {"device": limits.of("device"), "host": limits.of("host")}
        least = min_seconds(cost, block, room, may(can))
        shares = solve(cost, block, limits, can)
        if shares is None:
            continue
        found = predicted(cost, block, shares).prediction
        assert found is not None
        assert least <= found.seconds * (1 + 1e-9)
        solved, tight = solved + 1, tight + (least > 0.9 * found.seconds)
    assert solved >= 6
    assert tight, "a bound that is never near anything rules nothing out"


@pytest.mark.covering
@pytest.mark.parametrize(("method", "codec"), [("full", "auto"), ("h2o", "int4")])
@pytest.mark.parametrize("latency_s", [None, 3.0, 1e-3])
def test_a_search_with_bounds_finds_what_one_without_finds(
    recall: ModelSize, method: str, codec: str, latency_s: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("scipy")
    cost = cost_of(recall, method, codec, 1e8)
    for more in (0, 2, 20):
        memory = min_memory(cost) + more * MiB
        limits = Limits(memory=memory, latency_s=latency_s, sequences=24, prompt_rows=128)
        found = outcome(cost, limits)
        with monkeypatch.context() as patch:
            patch.setattr(searching, "min_seconds", lambda *_: 0.0 if latency_s is None else -1.0)
            patch.setattr(searching, "_too_slow", lambda *_: False)
            assert outcome(cost, limits) == found


def outcome(cost: CostModel, limits: Limits) -> object:
    try:
        return search(cost, limits)
    except BudgetError as error:
        return str(error)


def test_a_place_without_room_has_no_bound(recall: ModelSize) -> None:
    cost = cost_of(recall, "full", "auto", 1e8)
    block = BlockShape(sequences=1, micro_batch=1, prompt_rows=16)
    assert min_seconds(cost, block, {"device": 0.0, "host": 0.0}, may(ENGINE)) == inf
