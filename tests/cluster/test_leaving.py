"""How requests leave a worker that reads prompts: right behind the step, whatever goes wrong on the way. No Ray."""

from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any

import pytest

from millpond.cluster.messages import RequestDelta, StartMessage
from millpond.cluster.settings import ClusterSettings
from millpond.cluster.worker import EngineWorker
from millpond.engine.request import Request
from millpond.engine.sampling.params import SamplingParams
from tests.helpers.hf.families import shared_model

NEW = 40


def request(name: str) -> Request:
    params = SamplingParams(max_tokens=NEW, temperature=0, ignore_eos=True)
    return Request(request_id=name, prompt=tuple(range(5, 30)), params=params)


def with_worker(use: Callable[[EngineWorker], Awaitable[None]], **settings: Any) -> None:
    """Use a worker that reads prompts; at the end nothing is left in it."""

    async def run() -> None:
        chosen = ClusterSettings(prefill=1, decode=1, **settings)
        worker = EngineWorker(copy.deepcopy(shared_model("llama")), {"method": "full"}, "prefill", chosen)
        await worker.open()
        try:
            await use(worker)
            left = (worker._handoff.size, worker._left, worker._newest, worker._tasks, worker._llm._engine._requests)
            assert not any(left), left
        finally:
            await worker.close()

    asyncio.run(run())


async def last_update(worker: EngineWorker, name: str) -> RequestDelta:
    """The one behind which nothing more comes of a request here."""
    while True:
        for update in (await worker.report(frozenset({name}))).updates:
            if update.name == name and (update.finished or update.dropped or update.offered is not None):
                return update


def test_a_request_is_offered_with_its_first_token() -> None:
    async def use(worker: EngineWorker) -> None:
        await worker.start([StartMessage(request("a"))])
        found = await last_update(worker, "a")
        assert found.offered == len(worker._handoff.fetch("a"))
        await worker.release("a")

    with_worker(use)


def test_a_request_that_stays_or_has_no_room_decodes_here() -> None:
    async def use(worker: EngineWorker) -> None:
        await worker.start([StartMessage(request("a"), stays=True)])
        assert (await last_update(worker, "a")).finished

    async def without_room(worker: EngineWorker) -> None:
        await worker.start([StartMessage(request("a"))])
        assert (await last_update(worker, "a")).finished

    with_worker(use)
    with_worker(without_room, handoff_memory=1000)


def test_more_bytes_than_expected_begin_the_request_again_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(worker: EngineWorker) -> None:
        monkeypatch.setattr(worker._handoff, "put", lambda name, data: bool(worker._handoff.drop(name)))
        await worker.start([StartMessage(request("a"))])
        assert (await last_update(worker, "a")).dropped

    with_worker(use)


def test_an_error_ends_that_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(worker: EngineWorker) -> None:
        engine = worker._llm._engine
        begin_export = engine.begin_export

        def fails(name: str) -> Future[bytes]:
            if name == "a":
                raise RuntimeError("out of luck")
            leaving = begin_export(name)
            if name == "c":  # when it has left
                leaving = Future()
                leaving.set_exception(RuntimeError("no codes"))
            return leaving

        monkeypatch.setattr(engine, "begin_export", fails)
        await worker.start([StartMessage(request(name)) for name in "ab"])
        (kind, text) = (await last_update(worker, "a")).error or ("", "")
        assert (kind, "out of luck" in text) == ("", True)
        await worker.start([StartMessage(request("c"))])
        assert "no codes" in ((await last_update(worker, "c")).error or ("", ""))[1]
        await worker.start([StartMessage(request("d"))])
        assert (await last_update(worker, "d")).offered
        for name in "bd":
            await worker.release(name)

    with_worker(use)


def test_one_that_is_cancelled_while_it_is_packed_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(worker: EngineWorker) -> None:
        engine, packing, go = worker._llm._engine, asyncio.Event(), threading.Event()
        begin_export, loop = engine.begin_export, asyncio.get_running_loop()

        def slow(name: str) -> Future[bytes]:
            loop.call_soon_threadsafe(packing.set)
            assert go.wait(60)
            return begin_export(name)

        monkeypatch.setattr(engine, "begin_export", slow)
        await worker.start([StartMessage(request("a"))])
        await packing.wait()
        cancelled = asyncio.ensure_future(worker.cancel("a"))
        await asyncio.sleep(0.05)
        assert not cancelled.done(), "it waits for the engine, which packs"
        go.set()
        await cancelled

    with_worker(use)
