"""Losses that come together, requests that end their workers, and ends that no worker brings. No Ray."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import pytest

import millpond as mp
from millpond.cluster.async_llm import AsyncClusterLLM
from millpond.cluster.cluster_request import ClusterRequest
from millpond.cluster.dispatcher import RetryQueue
from millpond.cluster.handle import WorkerLostError
from millpond.cluster.messages import WorkerReport
from millpond.engine.outputs import RequestOutput
from millpond.engine.request import Request
from millpond.errors import MillpondError
from tests.cluster.test_dispatch import NEW, PROMPTS, answers, expected, finished, params, start
from tests.helpers.cluster.local import LocalCluster, LocalWorker

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # a share of a few tokens
POISON = 2  # the prompt that ends its workers


def ends_of(queues: list[Any]) -> list[RequestOutput]:
    """The last output of each request, with an error or without."""
    found = []
    for queue in queues:
        while not (output := queue.get()).finished:
            pass
        found.append(output)
    return found


def check_it_ended_alone(outputs: list[RequestOutput], times: int) -> None:
    error = outputs[POISON].error
    assert isinstance(error, MillpondError)
    assert f"was lost {times} times with its worker" in str(error)
    others = [output for index, output in enumerate(outputs) if index != POISON]
    assert [output.error for output in others] == [None] * len(others)
    assert answers(others) == [one for index, one in enumerate(expected()) if index != POISON]


@pytest.mark.covering
@pytest.mark.parametrize("layout", [{"replicas": 1}, {"replicas": 2}, {"prefill": 1, "decode": 1}], ids=str)
@pytest.mark.parametrize("max_replays", [1, 2])
def test_a_prompt_that_ends_its_workers_takes_no_other_along(layout: dict[str, int], max_replays: int) -> None:
    """It does so before any request has a token, so all that are with it are lost as often as it is."""

    def watch(worker: LocalWorker, report: WorkerReport) -> None:
        if any(request.prompt == PROMPTS[POISON] for request in worker.sent):
            worker.die()

    with LocalCluster(watch, max_replays=max_replays, **layout) as local:
        check_it_ended_alone(ends_of(start(local, PROMPTS)), max_replays + 1)
        assert local.llm.figures().deaths == max_replays + 1
        local.settle()


def test_bytes_that_end_the_worker_that_takes_them_end_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker that they come from lives, and would offer them to one after another."""
    take = LocalWorker.take

    async def deadly(self: LocalWorker, name: str, offered: Any) -> None:
        if name.startswith(f"{POISON}#"):
            self.die()
            raise WorkerLostError(f"{self.name} died")
        await take(self, name, offered)

    monkeypatch.setattr(LocalWorker, "take", deadly)
    with LocalCluster(prefill=1, decode=1, max_replays=1) as local:
        check_it_ended_alone(ends_of(start(local, PROMPTS)), 2)
        assert local.llm.figures().deaths == 2
        local.settle()


class Offer:
    """Where the bytes of a request are."""

    def __init__(self, *parts: Any) -> None:
        self.parts = parts

    def __iter__(self) -> Any:
        return iter(self.parts)


def test_a_move_that_fails_keeps_nothing_of_what_was_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the help of the garbage collector, which may come late: with Ray it is a place in the store."""
    offers = list[weakref.ref[Offer]]()

    def offered(self: LocalWorker, name: str) -> Any:
        made = Offer(self, name)
        offers.append(weakref.ref(made))
        return made

    async def lost(self: LocalWorker, name: str, offered: Any) -> None:
        await asyncio.sleep(0)
        if len(offers) < 3:
            raise WorkerLostError("it is gone")
        await take(self, name, offered)

    take = LocalWorker.take
    monkeypatch.setattr(LocalWorker, "offered", offered)
    monkeypatch.setattr(LocalWorker, "take", lost)
    gc.collect()
    gc.disable()
    try:
        with LocalCluster(prefill=1, decode=1) as local:
            assert answers(local.llm.generate(PROMPTS[:1], params())) == expected()[:1]
            local.settle()
            assert len(offers) == 3
            assert [ref() for ref in offers] == [None] * 3
    finally:
        gc.enable()


def test_last_tries_come_one_at_a_time() -> None:
    tries = RetryQueue(2)
    first, second, third = (
        ClusterRequest(Request(request_id=str(index), prompt=(1,), params=params()), lambda _: None, replays=2)
        for index in range(3)
    )
    assert [tries.acquire(one, wait=True) for one in (first, second, third)] == [True, False, False]
    assert tries.acquire(first, wait=True), "the same one goes from worker to worker"
    assert tries.release(second) is None
    assert tries.release(first) is third, "the second one was cancelled while it waited"
    assert tries.release(third) is None
    assert not [one for one in (first, second) if RetryQueue(0).acquire(one, wait=True) is False and one.replays == 0]
    first.replays = second.replays = 0
    none = RetryQueue(0)
    assert none.acquire(first, wait=True)
    assert none.acquire(second, wait=True), "without replays there is no last one"


def test_a_worker_whose_reports_fail_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the error is: else its requests would wait for ever."""
    report, failed = LocalWorker.report, list[str]()

    async def broken(self: LocalWorker, wanted: frozenset[str]) -> WorkerReport:
        if self.sent and not failed:
            failed.append(self.name)
            raise RuntimeError("a message that cannot be read")
        return await report(self, wanted)

    monkeypatch.setattr(LocalWorker, "report", broken)
    with LocalCluster(replicas=1) as local:
        assert answers(local.llm.generate(PROMPTS, params())) == expected()
        assert failed == ["replica-0"]
        assert [worker.name for worker in local.llm.workers()] == ["replica-1"]


def test_requests_wait_for_a_worker_that_starts_where_another_one_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    gates: dict[str, asyncio.Event] = {}
    opened = LocalWorker.open

    async def open_late(self: LocalWorker) -> Any:
        if self.name in ("replica-2", "replica-3"):
            gates[self.name] = asyncio.Event()
            await gates[self.name].wait()
        if self.name in ("replica-0", "replica-1", "replica-3"):
            return await opened(self)
        raise MillpondError("no memory")

    monkeypatch.setattr(LocalWorker, "open", open_late)
    with LocalCluster(replicas=2) as local:
        loop, first = local.cluster.loop, list(local.made)
        for worker in first:
            worker.hold = 4
        ends = start(local, PROMPTS)
        for number, worker in enumerate(first):
            loop.call(worker.die).result()
            local.wait_until(lambda number=number: len(gates) > number)
        loop.call(gates["replica-2"].set).result()
        local.wait_until(lambda: len(local.made) == 6 and len(local.cluster.dispatcher._pool._starting) == 1)
        loop.call(gates["replica-3"].set).result()
        assert answers(finished(ends)) == expected()
        assert [worker.name for worker in local.llm.workers()] == ["replica-3"]


@pytest.mark.parametrize("victim", [0, 1], ids=["prefill", "decode"])
def test_where_no_worker_starts_any_more_later_requests_are_refused(
    monkeypatch: pytest.MonkeyPatch, victim: int
) -> None:
    opened = LocalWorker.open

    async def never_again(self: LocalWorker) -> Any:
        if not self.name.endswith("-0"):
            raise MillpondError("no memory")
        return await opened(self)

    monkeypatch.setattr(LocalWorker, "open", never_again)
    with LocalCluster(prefill=1, decode=1) as local:
        dies = local.made[victim]
        local.cluster.loop.call(dies.die).result()
        for _ in range(2):
            with pytest.raises(MillpondError, match=f"no {dies.role} worker is left, and none starts: no memory"):
                local.llm.generate(PROMPTS[:1], params())
        local.settle()


@pytest.mark.parametrize("workers", [1, 0], ids=["held", "none"])
def test_a_deadline_ends_a_request_whose_worker_does_not(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that stays in a step, or none that serves."""
    with LocalCluster(replicas=1) as local:
        local.made[0].hold = 1
        if not workers:
            monkeypatch.setattr(LocalWorker, "open", lambda self: asyncio.Event().wait())
            local.cluster.loop.call(local.made[0].die).result()
            local.wait_until(lambda: not local.cluster.dispatcher.live()["replica"])
        (last,) = finished(start(local, PROMPTS[:1], deadline=0.5))
        assert last.completions[0].finish_reason == "deadline"
        tokens = last.completions[0].token_ids
        assert tokens == expected()[0][0][: len(tokens)]
        assert len(tokens) < NEW
        assert not local.cluster.dispatcher.busy
        local.made[0].go.set()
        local.settle()


@pytest.mark.parametrize("sent", [False, True], ids=["not-sent-yet", "sent"])
def test_a_request_that_is_cancelled_on_its_way_into_the_engine_never_runs(sent: bool) -> None:
    with LocalCluster(replicas=1) as local:
        dispatcher, loop, outputs = local.cluster.dispatcher, local.cluster.loop, list[RequestOutput]()
        request = Request(request_id="x", prompt=PROMPTS[1], params=params())
        local.made[0].paused = True  # a request that is sent may otherwise run before its cancellation arrives

        async def submit_and_cancel() -> None:
            dispatcher.submit(request, outputs.append)
            while sent and not local.made[0].sent:
                await asyncio.sleep(0)
            dispatcher.cancel("x")

        loop.run(submit_and_cancel())
        assert [output.completions[0].finish_reason for output in outputs] == ["cancelled"]
        local.wait_until(lambda: not dispatcher._start_batcher._waiting)
        local.settle()
        assert bool(local.made[0].sent) is sent
        stats = local.made[0].engine._llm.stats()
        assert (stats.prompt_tokens, stats.generated_tokens) == (0, 0)


def test_a_client_that_leaves_while_its_request_is_submitted_leaves_nothing() -> None:
    async def leave(llm: AsyncClusterLLM, local: LocalCluster) -> None:
        request = Request(request_id="x", prompt=PROMPTS[0], params=params())
        reading = asyncio.ensure_future(anext(llm.stream(request)))
        for _ in range(2):  # it is submitted in the pass after the one in which it is sent
            await asyncio.sleep(0)
        local.wait_until(lambda: local.cluster.dispatcher.busy)  # this loop stands still meanwhile
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        while local.cluster.dispatcher.busy:  # as in a server, whose loop lives on
            await asyncio.sleep(0.01)

    with LocalCluster(replicas=1) as local:
        local.made[0].hold = 1
        asyncio.run(leave(AsyncClusterLLM.of(local.cluster, "tiny", None), local))
        local.made[0].go.set()
        local.settle()


def test_a_worker_remembers_nothing_of_requests_that_ended() -> None:
    with LocalCluster(prefill=1, decode=1) as local:
        local.llm.generate(PROMPTS, params())
        local.llm.generate(PROMPTS, mp.SamplingParams(max_tokens=1))
        local.settle()
        for worker in local.made:
            engine = worker.engine
            assert not engine._reported
            assert not engine._sizes
            assert not engine._cancelled
