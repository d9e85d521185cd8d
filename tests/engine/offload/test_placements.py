"""The acceptance matrix: wherever weights and KV lie, in whatever order, tokens are those of the model in memory."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest

import millpond as mp
from millpond.engine.config import EngineConfig
from millpond.engine.engine import Engine
from millpond.engine.offload.open import open_in_memory
from millpond.engine.offload.plan import Plan
from millpond.tiers.devices import SimulatedDevice
from tests.engine.test_offload import CODECS, FAMILIES, METHODS, answers, in_memory, options

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

MEMORY, DEVICE = "16MiB", 4 << 20
#: Shares of the layers' weights; those with a device run on a simulated one.
WEIGHTS = [
    {"host": 1.0},
    {"disk": 1.0},
    {"host": 0.4, "disk": 0.6},
    {"device": 1.0},
    {"device": 0.2, "host": 0.4, "disk": 0.4},
]
KV = [{"host": 1.0}, {"disk": 1.0}, {"host": 0.4, "disk": 0.6}]
#: Micro-batches; of nine sequences 16 are all.
SIZES, SCHEDULES = (1, 4, 16), ("row", "zigzag", "diagonal")
ENDS = ("host", "disk")
ORDERS = list(itertools.product(SCHEDULES, SIZES))


def cells() -> list[tuple[Any, ...]]:
    """Every placement for every family, method and number format; orders in turns, so that each meets each placement,
    and embeddings and head on the disk in every second.

    Shuffled, so that few of them have every value.
    """
    found = []
    placements = list(itertools.product(WEIGHTS, KV))
    for n, (name, method, codec) in enumerate(itertools.product(FAMILIES, METHODS, CODECS)):
        for place, (weights, kv) in enumerate(placements):
            found.append((name, method, codec, weights, kv, *ORDERS[(n + place) % len(ORDERS)], ENDS[(n + place) % 2]))
    random.Random(7).shuffle(found)
    return found


CELLS = cells()


def test_every_placement_meets_every_order_method_and_codec() -> None:
    seen = {(str(weights), str(kv), order, size, ends) for _, _, _, weights, kv, order, size, ends in CELLS}
    assert len(seen) == len(WEIGHTS) * len(KV) * len(ORDERS) * len(ENDS)
    seen_methods = {(str(weights), str(kv), method, codec) for _, method, codec, weights, kv, _, _, _ in CELLS}
    assert len(seen_methods) == len(WEIGHTS) * len(KV) * len(METHODS) * len(CODECS)


@pytest.mark.covering
@pytest.mark.parametrize(("name", "method", "codec", "weights", "kv", "schedule", "size", "ends"), CELLS)
def test_tokens_are_those_of_the_model_in_memory(
    name: str,
    method: str,
    codec: str,
    weights: dict[str, float],
    kv: dict[str, float],
    schedule: Any,
    size: int,
    ends: Any,
    folders: dict[str, Path],
) -> None:
    plan = Plan(weights=weights, kv=kv, schedule=schedule, micro_batch=size, slots=2, prompt_rows=256, ends=ends)
    device = SimulatedDevice(DEVICE) if "device" in weights else None
    config = EngineConfig(**options(method, codec, name))
    found = open_in_memory(folders[name], MEMORY, plan, None, config, device=device)
    engine = Engine(found.model, None, found.config, streamed=found.streamed, tier=found.tier)
    tokens = answers(engine)
    assert tokens == in_memory(name, method, codec)
    assert len(set(tokens)) > 5, "answers differ, so that mixed-up requests would be seen"
    assert found.ledger.peak("host") <= mp.Budget.parse(MEMORY).amount
    if weights.get("disk") or ends == "disk":
        assert found.streamed is not None
        assert found.streamed.bytes_read > 0
    if device is not None:
        assert 0 < found.ledger.peak("device") <= DEVICE
    if kv.get("disk"):
        assert found.tier is not None
        assert found.tier.bytes_read > 0
        assert found.tier.bytes_used == 0, "all requests have ended"
    engine.check_integrity()
    engine.close()
    assert found.ledger.by_purpose("disk").get("kv") is None
