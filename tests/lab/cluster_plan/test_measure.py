"""What engines did, step by step and move by move, and profiles of one engine and of workers that run at once."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncGenerator, Iterator

import pytest

from millpond.cluster.async_llm import AsyncClusterLLM
from millpond.engine.async_llm import AsyncLLM
from millpond.engine.engine import Engine
from millpond.engine.outputs import RequestOutput
from millpond.engine.request import Request
from millpond.engine.sampling.params import SamplingParams
from millpond.errors import MillpondError, OptionError
from millpond_lab.cluster_plan import record
from millpond_lab.cluster_plan.layout import FREE_MOVES, MoveTimes
from millpond_lab.cluster_plan.measure import Measured, measure
from millpond_lab.cluster_plan.profile import LEAST, StepLoad
from millpond_lab.cluster_plan.record import EngineRecord, RecordedEngines, StepRecorder
from tests.helpers.cluster.local import LocalCluster
from tests.helpers.hf.families import shared_model

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # a share of a few tokens

#: Seconds, longer than any step of these models.
LONG = 0.6
PROMPTS, NEW = (12, 24), 6


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine(shared_model("llama"), method="full", max_step_tokens=64)
    yield made
    made.close()


def request(name: str, tokens: int = 10, new: int = 4) -> Request:
    params = SamplingParams(max_tokens=new, temperature=0, ignore_eos=True)
    return Request(request_id=name, prompt=tuple(5 + n % 80 for n in range(tokens)), params=params)


def test_a_step_is_what_it_reads_and_decodes(engine: Engine) -> None:
    recorder = StepRecorder(engine)
    engine.add(request("a", 100, 3))
    while engine.busy:
        engine.step()
    found = recorder.end()
    assert [load for load, _ in found.steps] == [
        StepLoad(64, 64**2, 0, 0, 0),
        StepLoad(36, 100**2 - 64**2, 1, 0, 0),
        StepLoad(answers=1, entries=101),
        StepLoad(answers=1, entries=102),
    ]
    assert (found.step_tokens, found.moves) == (64, ())
    engine.add(request("b"))
    engine.step()
    assert len(recorder.end().steps) == 4, "nothing is recorded any more"


def test_what_lies_between_two_steps_counts_while_the_engine_has_work(engine: Engine) -> None:
    recorder = StepRecorder(engine)
    engine.add(request("a", new=3))
    engine.step()
    time.sleep(LONG)
    engine.step()
    engine.step()
    assert not engine.busy
    time.sleep(LONG)
    engine.add(request("b", new=1))
    engine.step()
    seconds = [took for _, took in recorder.end().steps]
    assert [took > LONG for took in seconds] == [False, True, False, False]


def test_moves_have_seconds_of_their_own(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = StepRecorder(engine)
    for name in "ab":
        engine.add(request(name, 20, 8))
    engine.step()
    to_bytes = engine._transfer.to_bytes
    monkeypatch.setattr(engine._transfer, "to_bytes", lambda live: time.sleep(LONG) or to_bytes(live))
    data = engine.export_request("a")
    engine.import_request(data)
    engine.step()
    found = recorder.end()
    assert [(move.direction, move.request, move.prompt) for move in found.moves] == [("out", "a", 20), ("in", "a", 20)]
    assert [move.seconds > LONG for move in found.moves] == [True, False]
    out, into = found.moves
    assert out.began + out.seconds <= into.began + 0.01
    assert all(seconds < LONG for _, seconds in found.steps)


def test_an_engine_with_requests_is_not_recorded(engine: Engine) -> None:
    engine.add(request("a"))
    with pytest.raises(OptionError, match="one that has none"):
        StepRecorder(engine)


def profile_of(local: LocalCluster, workers: int = 1) -> tuple[Measured, list[EngineRecord]]:
    engines = RecordedEngines(AsyncClusterLLM.of(local.cluster, "tiny", None))
    records: list[EngineRecord] = []
    recorded = engines.recorded

    async def seen() -> list[EngineRecord]:
        records.extend(await recorded())
        return records

    engines.recorded = seen  # type: ignore[method-assign]
    found = asyncio.run(measure(engines, "tiny", prompts=PROMPTS, new=NEW, rounds=1, workers=workers))
    return found, records


@pytest.mark.slow
def test_a_profile_of_workers_that_run_at_once() -> None:
    with LocalCluster(replicas=2) as local:
        found, records = profile_of(local, workers=2)
    assert len(records) == 2
    assert all(len(record.steps) > LEAST for record in records)
    assert len(found.steps) == sum(len(record.steps) for record in records)
    assert found.profile.moves != FREE_MOVES, "of one of them, afterwards"
    assert found.latency_s is None


def test_a_worker_for_prompts_decodes_nothing_that_moves() -> None:
    """Its engine lets requests go right behind the step that ends their prompts."""
    with LocalCluster(prefill=1, decode=1) as local:
        found, records = profile_of(local)
        local.settle()
    by_role = dict(zip(("decode", "prefill"), records, strict=True))
    reading, decoding = by_role["prefill"], by_role["decode"]
    assert sum(load.answers for load, _ in reading.steps) == 0
    assert sum(load.tokens for load, _ in decoding.steps) == 0
    ended = sum(load.ended for load, _ in reading.steps)
    assert {move.direction for move in reading.moves} == {"out"}
    assert {move.direction for move in decoding.moves} == {"in"}
    assert len(reading.moves) == len(decoding.moves) == ended > 0
    size = found.profile.cache.moved(PROMPTS[0])
    taken = [move.seconds for move in decoding.moves if move.prompt == PROMPTS[0]]
    assert min(taken) < found.profile.moves.taking_in(size) < max(taken)
    assert found.latency_s is not None
    assert 0 <= found.latency_s < 60


def test_a_worker_that_has_started_since_was_not_recorded() -> None:
    with LocalCluster(replicas=1) as local:
        engines = RecordedEngines(AsyncClusterLLM.of(local.cluster, "tiny", None))
        with pytest.raises(OptionError, match="take the profile again"):
            asyncio.run(engines.recorded())


def test_a_recording_that_nobody_ends_goes_with_its_engine() -> None:
    async def begun() -> None:
        llm = AsyncLLM(shared_model("llama"), method="full")
        await record.begin(llm)
        assert len(record._RECORDERS) == 1
        await llm.close(drain=False)

    asyncio.run(begun())
    gc.collect()
    assert len(record._RECORDERS) == 0


def test_an_error_on_the_way_ends_the_recording() -> None:
    """And no request goes on."""
    with LocalCluster(replicas=1) as local:
        llm = AsyncClusterLLM.of(local.cluster, "tiny", None)
        stream, sent = llm.stream, list[Request]()

        async def fails(request: Request) -> AsyncGenerator[RequestOutput, None]:
            sent.append(request)
            if len(sent) > 80:  # some arrive by then
                raise MillpondError("out of luck")
            async for output in stream(request):
                yield output

        llm.stream = fails  # type: ignore[method-assign]
        with pytest.raises(MillpondError, match="out of luck"):
            asyncio.run(measure(RecordedEngines(llm), "tiny", prompts=PROMPTS, new=NEW, rounds=1))
        assert local.made[0].engine._llm._engine.on_step is None
        local.settle()


def test_one_engine_is_measured_as_workers_are() -> None:
    async def measured() -> Measured:
        llm = AsyncLLM(shared_model("llama"), method="full")
        try:
            return await measure(RecordedEngines(llm), "tiny", prompts=PROMPTS, new=NEW, rounds=1)
        finally:
            await llm.close(drain=False)

    found = asyncio.run(measured())
    assert found.refused is None
    assert isinstance(found.profile.moves, MoveTimes)
    with pytest.raises(OptionError, match="give shorter ones"):
        asyncio.run(too_long())


async def too_long() -> None:
    llm = AsyncLLM(shared_model("llama"), method="full")
    try:
        await measure(RecordedEngines(llm), "tiny", prompts=(llm.context_length,), new=NEW)
    finally:
        await llm.close(drain=False)
