"""A GPU that is not there: what its card lacks is told when an engine starts, and requests wait for its memory."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import millpond as mp
from millpond.cache.batch_cache import BatchCache
from millpond.engine import components
from millpond.engine.config import EngineConfig
from millpond.engine.device_memory import LEAST_SPARE, DeviceRoom, page_limit
from millpond.engine.engine import Engine
from millpond.engine.offload.open_on_device import check_device_memory
from millpond.engine.offload.options import LoadOptions
from millpond.engine.scheduler_request import RequestStatus
from millpond.kernels.card import Card
from millpond.models.device import check_dtype_there, check_room_for
from tests.helpers.engine.helpers import add, ask, engine_for, finish, greedy

CUDA, GB = torch.device("cuda"), 10**9


class FakeCuda:
    """What a card says of itself."""

    def __init__(self, capability: tuple[int, int] = (9, 0), free: int = 70 * GB, total: int = 80 * GB) -> None:
        self.capability, self.free, self.total = capability, free, total
        self.kept, self.taken = 3 * GB, 2 * GB  # by torch, and of that for tensors

    def get_device_properties(self, device: torch.device) -> Any:
        return SimpleNamespace(name="a card", major=self.capability[0], minor=self.capability[1])

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return self.free, self.total

    def memory_reserved(self, device: torch.device) -> int:
        return self.kept

    def memory_allocated(self, device: torch.device) -> int:
        return self.taken


def packed(device: torch.device = CUDA, dtype: torch.dtype = torch.bfloat16) -> Any:
    """What `page_limit` asks of a model."""
    return SimpleNamespace(device=device, dtype=dtype, vocabulary=1000, row_bytes=50_000)


def test_bfloat16_needs_a_card_that_has_it() -> None:
    old = FakeCuda((7, 5))
    with pytest.raises(
        mp.OptionError, match=r"capability 8\.0 on, and cuda is a card \(compute capability 7\.5\).*f16"
    ):
        check_dtype_there(CUDA, torch.bfloat16, cuda=old)
    check_dtype_there(CUDA, torch.float16, cuda=old)
    check_dtype_there(CUDA, torch.bfloat16, cuda=FakeCuda((8, 0)))
    check_dtype_there(torch.device("cpu"), torch.bfloat16, cuda=old)


def test_weights_need_room() -> None:
    small = FakeCuda(free=7 * GB, total=8 * GB)
    with pytest.raises(
        mp.BudgetError, match=r"16,000,000,000 bytes, and cuda \(a card\) has 8,000,000,000 free of 8,000,.*'6GiB'"
    ):
        check_room_for(CUDA, 16 * GB, cuda=small)
    check_room_for(CUDA, 8 * GB, cuda=small)
    check_room_for(torch.device("cpu"), 16 * GB, cuda=small)


def test_a_limit_beyond_the_card_is_told() -> None:
    card = Card.of(CUDA, FakeCuda())
    with pytest.raises(mp.BudgetError, match=r"device_memory=71,000,000,001 bytes .* has free, 71,000,000,000 of"):
        check_device_memory(card, 71 * GB + 1)
    check_device_memory(card, 71 * GB)


@pytest.mark.parametrize(("card", "match"), [(FakeCuda((7, 5)), "dtype='f16'"), (FakeCuda(free=-GB), "0 free of")])
def test_a_model_is_not_moved_to_a_card_that_cannot_run_it(
    card: FakeCuda, match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = Card.of
    monkeypatch.setattr(Card, "of", lambda device, cuda=None: known(device, card))
    monkeypatch.setattr(LoadOptions, "usable_gpu", lambda self: CUDA)
    with pytest.raises(mp.OptionError, match=match):
        mp.LLM("pond-recall", device="cuda", dtype="bf16")


# ---------------------------------------------------------------------- pages


def test_pages_get_what_a_step_leaves() -> None:
    config, cuda = EngineConfig(max_step_tokens=512, max_running=256), FakeCuda()
    room = DeviceRoom.of(packed(), config, cuda)
    logits = 1000 * (2 + 4)
    assert room.step_bytes == 512 * (50_000 - logits) + (256 + 32) * (logits + 2 * 4 * 1000)
    assert room.spare_bytes == 80 * GB * 3 // 100
    assert page_limit(packed(), config, cuda) == 71 * GB - room.step_bytes - room.spare_bytes
    assert DeviceRoom.of(packed(), config, FakeCuda(total=GB)).spare_bytes == LEAST_SPARE


def test_a_limit_that_is_given_holds_where_the_card_has_it() -> None:
    assert page_limit(packed(), EngineConfig(kv_memory="30GB"), FakeCuda()) == 30 * GB
    with pytest.raises(mp.BudgetError, match=r"kv_memory=71,000,000,001 bytes is more than is there: a card has 71,"):
        page_limit(packed(), EngineConfig(kv_memory=71 * GB + 1), FakeCuda())
    cpu = packed(torch.device("cpu"))
    assert page_limit(cpu, EngineConfig(), FakeCuda()) is None
    assert page_limit(cpu, EngineConfig(kv_memory=71 * GB + 1), FakeCuda()) == 71 * GB + 1


def test_a_card_without_room_for_a_step_is_told() -> None:
    with pytest.raises(
        mp.BudgetError, match=r"a card has 1,600,000,000 of 80,.*nothing is left.*max_step_tokens \(65536\)"
    ):
        page_limit(packed(), EngineConfig(max_step_tokens=65_536), FakeCuda(free=600_000_000, total=80 * GB))


def test_an_engine_asks_for_the_dtype_too() -> None:
    with pytest.raises(mp.OptionError, match="compute capability 7"):
        page_limit(packed(), EngineConfig(), FakeCuda((7, 0)))


# ---------------------------------------------------------------------- engines that have so much


def left(monkeypatch: pytest.MonkeyPatch, n_bytes: int, method: str = "full") -> Engine:
    """An engine whose GPU has so much left for pages."""
    monkeypatch.setattr(components, "page_limit", lambda model, config: n_bytes)
    return engine_for(method)


def answers(engine: Engine) -> list[Any]:
    for number in range(6):
        add(engine, ask(60 + number, greedy(24), name=f"{number}"))
    outputs = finish(engine)
    assert not [output.error for output in outputs.values() if output.error is not None]
    return [outputs[f"{number}"].completions[0].token_ids for number in range(6)]


def test_requests_wait_for_memory_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    free = engine_for("full")
    expected = answers(free)
    free.close()
    one = engine_for("full")
    need = one._validator.validate(ask(65, greedy(24))).scheduled.memory_need.peak(1)
    one.close()
    engine = left(monkeypatch, 2 * need)
    assert engine._scheduler.limit_bytes is None  # no request is promised what its longest answer would take
    assert answers(engine) == expected
    assert engine.stats().preemptions > 0
    engine.close()


def test_a_prompt_that_never_fits_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    one = engine_for("full")
    need = one._validator.validate(ask(30, greedy(1))).scheduled.memory_need
    one.close()
    engine = left(monkeypatch, need.prefill)
    with pytest.raises(mp.BudgetError, match=f"and the GPU has {need.prefill:,} for all"):
        engine.add(ask(60, greedy(1)))
    add(engine, ask(30, greedy(1)))
    assert finish(engine)
    engine.close()


def test_less_than_any_request_takes_is_told_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(mp.BudgetError, match=r"what the GPU has left, 1,000 bytes, holds no request.*smaller model"):
        left(monkeypatch, 1000)


def full_beyond(engine: Engine, monkeypatch: pytest.MonkeyPatch, n_bytes: int) -> None:
    """Let passes of an engine run out of memory when pages hold more than so many bytes."""
    run = engine._executor.run

    def short(groups: Any, reading: Any) -> Any:
        if engine._parts.memory.live_bytes > n_bytes:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.\nmore lines")
        return run(groups, reading)

    monkeypatch.setattr(engine._executor, "run", short)


def test_requests_wait_where_a_pass_runs_out_of_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    free = engine_for("full")
    expected = answers(free)
    need = free._validator.validate(ask(65, greedy(24))).scheduled.memory_need.peak(1)
    free.close()
    engine = left(monkeypatch, 6 * need)
    full_beyond(engine, monkeypatch, 3 * need)
    with caplog.at_level(logging.WARNING):
        assert answers(engine) == expected
    limit = engine._parts.memory.limit_bytes
    assert limit is not None
    assert limit < 6 * need
    assert f"they get {limit:,} until" in caplog.text
    monkeypatch.undo()
    assert answers(engine) == expected  # later ones have all of it again
    assert engine._parts.memory.limit_bytes == 6 * need
    engine.close()


def test_requests_wait_where_the_plan_of_a_prompt_runs_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    free = engine_for("h2o")
    expected = answers(free)
    free.close()
    engine = left(monkeypatch, 10**8, method="h2o")
    run, full = BatchCache.run_plans, [True, True]

    def short(cache: BatchCache) -> None:
        if full and engine._scheduler.count(RequestStatus.DECODE) > 1:
            full.pop()
            raise torch.OutOfMemoryError("CUDA out of memory.")
        run(cache)

    monkeypatch.setattr(BatchCache, "run_plans", short)
    assert answers(engine) == expected
    assert not full
    engine.close()


def test_a_request_that_needs_more_than_there_is_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = left(monkeypatch, 10**8)
    full_beyond(engine, monkeypatch, 0)
    engine.add(ask(60, greedy(24), name="0"))
    (output,) = finish(engine).values()
    assert isinstance(output.error, mp.MillpondError)
    assert "ran out of memory in a pass that ran for this request alone" in str(output.error)
    assert "(CUDA out of memory. Tried to allocate 20.00 MiB.)" in str(output.error)
    engine.close()
