"""How requests come to a worker: one message for all that are there, and one step of its engine for them. No Ray."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from millpond.cluster.async_llm import AsyncClusterLLM, BatchedCalls
from millpond.cluster.cluster_request import ClusterRequest
from millpond.cluster.event_loop import LoopThread
from millpond.cluster.messages import ReportedOutput, StartMessage, WorkerReport
from millpond.engine import async_llm
from millpond.engine.outputs import RequestOutput, Times
from millpond.engine.request import Request
from millpond.errors import OptionError
from tests.cluster.test_dispatch import PROMPTS, answers, expected, params
from tests.helpers.cluster.local import LocalCluster, LocalWorker

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # a share of a few tokens


def request(index: int) -> Request:
    return Request(request_id=str(index), prompt=PROMPTS[index], params=params())


async def read(llm: AsyncClusterLLM, index: int) -> RequestOutput:
    last = None
    async for output in llm.stream(request(index)):
        last = output
    assert last is not None
    return last


def test_requests_of_tasks_that_run_at_once_are_in_one_message_and_in_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what comes of them in one step is in one report."""
    monkeypatch.setattr(async_llm, "_CALLS_IDLE_S", 1000 * async_llm._CALLS_IDLE_S)  # the machine may be slow
    reports = list[WorkerReport]()
    with LocalCluster(lambda _, report: reports.append(report), {"max_step_tokens": 512}, replicas=1) as local:
        worker, gate = local.made[0].engine._llm, threading.Event()
        steps = list[int]()
        worker._engine.on_step = lambda step, _: steps.append(len(step.prefills) + len(step.decodes))
        llm = AsyncClusterLLM.of(local.cluster, "tiny", None)
        local.cluster.loop.start(worker.call(lambda engine: gate.wait()))  # the engine begins when all are there

        plain, calls = local.cluster.loop.call, list[Any]()
        local.cluster.loop.call = lambda function: calls.append(function) or plain(function)  # type: ignore[func-returns-value,method-assign]

        async def all_of_them() -> list[RequestOutput]:
            found = [asyncio.ensure_future(read(llm, index)) for index in range(len(PROMPTS))]
            while sum(map(len, worker._calls._waiting.values())) < len(PROMPTS):
                await asyncio.sleep(0.001)
            assert len(calls) == 1, "all are submitted together"
            gate.set()
            return await asyncio.gather(*found)

        outputs = asyncio.run(all_of_them())
    assert answers(outputs) == expected()
    assert local.made[0].messages == [len(PROMPTS)]
    assert set(steps) == {len(PROMPTS)}
    assert {len(report.updates) for report in reports if report.updates} == {len(PROMPTS)}


def submitted(local: LocalCluster, worker: LocalWorker, n: int) -> list[RequestOutput]:
    """Where the ends of `n` requests come, each sent when a worker had a message."""
    ends = list[RequestOutput]()

    def deliver(output: RequestOutput) -> None:
        if output.finished:
            ends.append(output)

    for index in range(n):
        local.cluster.loop.call(lambda index=index: local.cluster.dispatcher.submit(request(index), deliver)).result()
        local.wait_until(lambda: worker.messages)
    return ends


def test_requests_that_come_until_a_message_is_answered_are_in_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    start, gate = LocalWorker.start, asyncio.Event()

    async def slow(self: LocalWorker, starts: Sequence[StartMessage]) -> None:
        await start(self, starts)
        await gate.wait()

    monkeypatch.setattr(LocalWorker, "start", slow)
    with LocalCluster(replicas=1) as local:
        dispatcher, loop, worker = local.cluster.dispatcher, local.cluster.loop, local.made[0]
        ends = submitted(local, worker, 4)
        loop.call(lambda: dispatcher.cancel("2")).result()
        assert worker.messages == [1]
        loop.call(gate.set).result()
        local.wait_until(lambda: len(ends) == 4)
        assert worker.messages == [1, 2]
        assert [one.request_id for one in worker.sent] == ["0#0", "1#0", "3#0"]
        assert {end.request_id: end.completions[0].finish_reason for end in ends}["2"] == "cancelled"
        local.settle()
        assert not dispatcher._start_batcher._waiting


def test_a_worker_that_dies_with_a_message_gets_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in none yet goes to the worker in its place, as what was in one does."""

    async def stuck(self: LocalWorker, starts: Sequence[StartMessage]) -> None:
        if self.name == "replica-0":
            self.messages.append(len(starts))
            await self._of(asyncio.Event().wait())
        await start(self, starts)

    start = LocalWorker.start
    monkeypatch.setattr(LocalWorker, "start", stuck)
    with LocalCluster(replicas=1) as local:
        dispatcher, loop, first = local.cluster.dispatcher, local.cluster.loop, local.made[0]
        ends = submitted(local, first, 2)
        loop.call(first.die).result()
        local.wait_until(lambda: len(ends) == 2)
        assert first.messages == [1]
        assert answers(sorted(ends, key=lambda end: end.request_id)) == expected()[:2]
        assert not dispatcher._start_batcher._waiting


def test_calls_of_one_pass_are_made_together() -> None:
    loop = LoopThread("test")
    calls, made, sent = BatchedCalls(loop), list[Any](), list[int]()
    plain = loop.call

    def counted(function: Any) -> Any:
        sent.append(1)
        return plain(function)

    loop.call = counted  # type: ignore[method-assign]

    def fails() -> None:
        raise OptionError("no")

    async def one_pass() -> list[Any]:
        left = asyncio.ensure_future(calls.call(lambda: made.append("cancelled")))
        found = [asyncio.ensure_future(calls.call(lambda n=n: made.append(n) or n)) for n in range(3)]
        found.append(asyncio.ensure_future(calls.call(fails)))
        await asyncio.sleep(0)  # all have been called, and none was made
        left.cancel()
        return await asyncio.gather(*found, return_exceptions=True)

    try:
        *numbers, error = asyncio.run(one_pass())
        assert numbers == [0, 1, 2]
        assert isinstance(error, OptionError)
        assert made == [0, 1, 2]
        assert len(sent) == 1
        assert not calls._waiting
    finally:
        loop.close()


@pytest.mark.parametrize("asked", [True, False])
def test_how_far_a_prompt_is_read_reaches_the_client_that_asked(asked: bool) -> None:
    """Over reports, which say what is new only; one that says nothing new is not passed on."""
    wanted = Request(request_id="one", prompt=(1,) * 40, params=params(), tell_read=asked)
    entry, reported = ClusterRequest(wanted, lambda _: None), ReportedOutput()
    heard = []
    for read in (16, 32, 32, 40):
        output = RequestOutput("one#0", None, wanted.prompt, (), Times(1.0, 1.5), read=read, cached=8)
        if entry.add(reported.update(output, 2.0), 3.0):
            heard.append((entry.output().read, entry.output().cached, entry.output().times.started))
    assert heard == ([(16, 8, 2.5), (32, 8, 2.5), (40, 8, 2.5)] if asked else [])
