"""AsyncLLM: many tasks, one engine."""

from __future__ import annotations

import asyncio
import random
import re
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest

import millpond as mp
from millpond.engine.outputs import RequestOutput
from millpond.errors import MillpondError, OptionError
from tests.helpers.engine.helpers import alone, ask, greedy, tokens
from tests.helpers.hf.families import shared_model


def served(body: Callable[[mp.AsyncLLM], Awaitable[Any]], **options: Any) -> Any:
    """Run `body` on an engine of its own, which must be empty afterwards."""

    async def run() -> Any:
        chosen = {"budget": "30%", "max_step_tokens": 16, "page_slots": 4, "kv_memory": "100kB"} | options
        llm = mp.AsyncLLM(shared_model("llama"), **chosen)
        try:
            return await asyncio.wait_for(body(llm), 60)
        finally:
            await llm.close()
            assert llm.stats().kv_reserved == 0
            assert llm.stats().running == llm.stats().waiting == llm.stats().swapped == 0

    return asyncio.run(run())


async def last(llm: mp.AsyncLLM, request: Any) -> RequestOutput:
    found = None
    async for output in llm.stream(request):
        found = output
    assert found is not None
    return found


def test_outputs_grow_and_end() -> None:
    async def body(llm: mp.AsyncLLM) -> None:
        outputs = [output async for output in llm.stream(ask(40))]
        lengths = [len(tokens(output)) for output in outputs]
        assert lengths == sorted(lengths)
        assert tokens(outputs[-1]) == alone("h2o", 40)
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]

    served(body)


async def begun(llm: mp.AsyncLLM) -> None:
    """Wait until the first tokens were chosen."""
    while llm.stats().generated_tokens < 2:
        await asyncio.sleep(0.001)


def test_closing_a_stream_frees_its_pages() -> None:
    async def body(llm: mp.AsyncLLM) -> None:
        stream = llm.stream(ask(40, greedy(200)))
        async for output in stream:
            if len(tokens(output)) >= 3:
                break
        await stream.aclose()
        await llm.call(lambda engine: None)
        assert llm.stats().kv_bytes == 0

    served(body)


def test_many_calls_at_once_do_not_hold_up_who_decodes() -> None:
    async def body(llm: mp.AsyncLLM) -> None:
        seen = []

        def call(engine: Any) -> None:
            seen.append(engine.stats().generated_tokens)
            time.sleep(0.01)

        async for _ in llm.stream(ask(40, greedy(200))):
            await asyncio.gather(*(llm.call(call, "many") for _ in range(30)))
            break
        assert len(set(seen)) > 20, "a step between two calls, not all calls between two steps"

    served(body)


def test_cancelling_a_task_and_by_name() -> None:
    async def body(llm: mp.AsyncLLM) -> None:
        task = asyncio.create_task(last(llm, ask(40, greedy(200), name="task")))
        other = asyncio.create_task(last(llm, ask(31, greedy(200), name="name")))
        await begun(llm)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await llm.cancel("name")
        await llm.cancel("nobody")
        assert (await other).completions[0].finish_reason == "cancelled"

    served(body)


def test_refusals_are_raised_and_harm_nobody_of_the_same_name() -> None:
    async def body(llm: mp.AsyncLLM) -> None:
        first = asyncio.create_task(last(llm, ask(40)))
        await asyncio.sleep(0)  # it asks, and nothing can have been answered yet
        with pytest.raises(OptionError, match="in flight"):
            await last(llm, ask(40))
        with pytest.raises(OptionError, match="context"):
            await last(llm, ask(300))
        assert tokens(await first) == alone("h2o", 40)

    served(body)


def test_many_requests_with_cancels_and_deadlines() -> None:
    draw = random.Random(5)

    async def one(llm: mp.AsyncLLM, number: int) -> str:
        length, kind = draw.choice([40, 57, 31, 20]), draw.random()
        request = ask(length, name=f"r{number}", deadline=0.05 if kind < 0.1 else None, priority=number % 3)
        await asyncio.sleep(draw.random() * 0.3)
        stream = llm.stream(request)
        outputs = []
        async for found in stream:
            outputs.append(found)
            if kind > 0.8:
                await stream.aclose()
                return "gone"
        output = outputs[-1]
        if output.completions[0].finish_reason == "length":
            assert tokens(output) == alone("h2o", length)
        return str(output.completions[0].finish_reason)

    for length in (40, 57, 31, 20):
        alone("h2o", length)

    async def body(llm: mp.AsyncLLM) -> list[str]:
        return await asyncio.gather(*(one(llm, number) for number in range(60)))

    ends = served(body, overcommit=3.0, kv_memory="60kB")
    assert len(ends) == 60
    assert {"length", "gone"} <= set(ends)


def test_close_drains_or_returns_what_runs() -> None:
    async def run(drain: bool) -> RequestOutput:
        llm = mp.AsyncLLM(shared_model("llama"), budget="30%", max_step_tokens=16)
        task = asyncio.create_task(last(llm, ask(40, greedy(30))))
        await begun(llm)
        await llm.close(drain=drain)
        with pytest.raises(MillpondError, match="clos"):
            await last(llm, ask(31))
        return await task

    assert asyncio.run(run(True)).completions[0].finish_reason == "length"
    assert asyncio.run(run(False)).completions[0].finish_reason in ("cancelled", "length")


def test_a_mistake_of_ours_leaves_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(llm: mp.AsyncLLM) -> None:
        def fail(*args: Any) -> None:
            raise ZeroDivisionError("by zero")

        with monkeypatch.context() as patch:
            await llm.call(lambda engine: patch.setattr(engine._model, "forward", fail))
            with pytest.raises(MillpondError, match="ZeroDivisionError"):
                await last(llm, ask(40))
        assert tokens(await last(llm, ask(40))) == alone("h2o", 40)

    served(body)


def test_names_and_defaults() -> None:
    async def body(llm: mp.AsyncLLM) -> None:
        assert (llm.model_name, llm.context_length, llm.vocab_size, llm.tokenizer) == ("pond", 256, 96, None)
        assert (llm.cache.method, llm.cache.budget) == ("h2o", "30%")

    served(body, model_name="pond")


def test_a_step_that_hangs_is_told_and_left_alone(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    goes_on = threading.Event()

    async def run() -> None:
        llm = mp.AsyncLLM(shared_model("llama"), budget="30%", max_step_tokens=16)
        with monkeypatch.context() as patch:
            run = llm._engine._executor.run
            patch.setattr(llm._engine._executor, "run", lambda *args: (goes_on.wait(30) and run(*args)) or [])
            task = asyncio.create_task(last(llm, ask(40)))
            while llm.trouble(0.1) is None:
                await asyncio.sleep(0.01)
            assert re.search("one step .* seconds, with 40 in it", str(llm.trouble(0.1)))
            assert llm.step_age_s > 0.1
            assert llm.trouble(60) is None
        goes_on.set()
        assert tokens(await task) == alone("h2o", 40)
        assert llm.trouble(0.5) is None
        goes_on.clear()
        step = llm._engine.step
        monkeypatch.setattr(llm._engine, "step", lambda: (goes_on.wait(30) and []) or step())
        task = asyncio.create_task(last(llm, ask(40)))
        while llm.trouble(0.05) is None:
            await asyncio.sleep(0.01)
        began = time.monotonic()
        await llm.close(drain=False, timeout=0.2)
        assert time.monotonic() - began < 5
        assert "left alone" in caplog.text
        goes_on.set()
        with suppress(MillpondError):
            await task
        await llm.close(drain=False)

    asyncio.run(run())


def test_an_engine_that_ends_tells_everybody(caplog: Any) -> None:
    async def run() -> None:
        llm = mp.AsyncLLM(shared_model("llama"), budget="30%", max_step_tokens=16)
        task = asyncio.create_task(last(llm, ask(40, greedy(200))))
        await begun(llm)
        llm._post(lambda: (_ for _ in ()).throw(SystemExit("secret of somebody")))
        with pytest.raises(MillpondError, match="the engine ended"):
            await task
        llm._thread.join(10)
        assert "thread ended with SystemExit" in str(llm.trouble(60))
        assert "secret" not in str(llm.trouble(60))
        assert "secret of somebody" in caplog.text
        with pytest.raises(MillpondError, match="clos"):
            await last(llm, ask(31))
        assert llm.stats().kv_reserved == 0
        await llm.close()

    asyncio.run(run())


def test_what_fails_for_every_request_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise ZeroDivisionError("by zero")

    async def run() -> None:
        llm = mp.AsyncLLM(shared_model("llama"), budget="30%", max_step_tokens=128)
        await llm.call(lambda engine: monkeypatch.setattr(engine._model, "forward", fail))
        found = await asyncio.gather(*(last(llm, ask(n)) for n in (40, 57, 31)), return_exceptions=True)
        assert all(isinstance(error, MillpondError) for error in found)
        while llm.trouble(60) is None:
            await asyncio.sleep(0.01)
        assert "ended with ZeroDivisionError" in str(llm.trouble(60))
        with pytest.raises(MillpondError, match=r"closed|takes no requests"):
            await last(llm, ask(40))
        await llm.close()

    asyncio.run(run())


def test_a_fault_of_one_request_ends_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(llm: mp.AsyncLLM) -> None:
        forward = llm._engine._model.forward

        def failing(*args: Any) -> Any:
            found = forward(*args)
            if "57" in llm._engine.in_step:
                raise OverflowError("too large")
            return found

        await llm.call(lambda engine: monkeypatch.setattr(engine._model, "forward", failing))
        found = await asyncio.gather(*(last(llm, ask(n)) for n in (40, 57, 31)), return_exceptions=True)
        assert isinstance(found[1], MillpondError)
        assert "'57' failed with OverflowError" in str(found[1])
        for output, length in ((found[0], 40), (found[2], 31)):
            assert isinstance(output, RequestOutput)
            assert tokens(output) == alone("h2o", length)
        assert llm.trouble(60) is None

    served(body)
