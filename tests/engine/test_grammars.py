"""Grammars are compiled in a process of their own: under limits, cancellable, kept, and with nobody held up."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from millpond.engine.async_llm import AsyncLLM
from millpond.engine.grammar.compiler import Grammar, Grammars
from millpond.engine.grammar.process import LIMITS, GrammarProcess
from millpond.engine.grammar.worker import CompileLimits
from millpond.engine.request import Request
from millpond.engine.sampling.params import SamplingParams
from millpond.errors import MillpondError, OptionError
from tests.engine.test_constraint import SCHEMA, byte_tokenizer

pytest.importorskip("xgrammar", reason="the extra 'constrained' is not installed")

#: Seconds of compiling on any CPU.
SLOW = {"type": "object", "properties": {f"k{i}": {"type": "string", "maxLength": 5_000 + i} for i in range(240)}}


#: Far less than a second of compiling.
QUICK = {"type": "object", "properties": {f"k{i}": {"type": "string", "maxLength": 60 + i} for i in range(3)}}


@pytest.fixture(scope="module")
def worker() -> Iterator[GrammarProcess]:
    made = GrammarProcess()
    yield made
    made.close()


@pytest.fixture(scope="module")
def grammars(worker: GrammarProcess) -> Grammars:
    return Grammars(byte_tokenizer(), worker=worker)


def test_a_grammar_is_compiled_once(grammars: Grammars) -> None:
    params = SamplingParams(json_schema=SCHEMA)
    assert grammars.of(SamplingParams()) is None
    assert grammars.of(params) is grammars.of(SamplingParams(json_schema=dict(SCHEMA)))


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"json_schema": {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}}, "no value"),
        ({"json_schema": {"type": "array", "contains": {}}}, "contains"),
        ({"grammar": "root ::= missing"}, "missing"),
        ({"grammar": "x" * 70_000}, "may have"),
        ({"choice": tuple(map(str, range(2_000)))}, "may have"),
        ({"regex": "(?=a)a"}, "cannot be enforced"),
    ],
)
def test_what_cannot_be_followed_is_an_option_error(grammars: Grammars, params: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        grammars.of(SamplingParams(**params))


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        (CompileLimits(cpu_seconds=1, memory_bytes=1 << 30, result_bytes=1 << 26), "more than 1 s of a processor"),
        (CompileLimits(cpu_seconds=20, memory_bytes=1 << 20, result_bytes=1 << 26), "more than 1 MiB to compile"),
        (CompileLimits(20, 1 << 30, 1 << 26, clock_seconds=0.05), r"more than 0\.05 s to compile"),
    ],
)
def test_time_and_memory_are_bounded(limits: CompileLimits, words: str, worker: GrammarProcess) -> None:
    worker.limits = limits
    grammars = Grammars(byte_tokenizer(), worker=worker)
    with pytest.raises(OptionError, match=words):
        grammars.of(SamplingParams(json_schema=SLOW))
    worker.limits = LIMITS
    grammars._worker = GrammarProcess()
    with pytest.raises(OptionError, match=words):
        grammars.of(SamplingParams(json_schema=SLOW))
    assert grammars._worker._process is None, "a refusal is remembered"


def test_a_busy_machine_refuses_nothing(worker: GrammarProcess) -> None:
    """Seconds of the clock do not count: the process that compiles stands still for longer than it may compute."""
    worker.limits = CompileLimits(cpu_seconds=1, memory_bytes=1 << 30, result_bytes=1 << 26)
    grammars = Grammars(byte_tokenizer(), worker=worker)
    found: list[object] = []

    def compile_it() -> None:
        try:
            found.append(grammars.of(SamplingParams(json_schema=QUICK)))
        except OptionError as error:
            found.append(error)

    grammars.of(SamplingParams(json_schema=SCHEMA))  # the worker runs
    assert worker._process is not None
    own = psutil.Process(worker._process.pid)
    while own.children():
        time.sleep(0.005)
    asking = threading.Thread(target=compile_it)
    asking.start()
    while not (children := own.children()):
        assert asking.is_alive(), found
    children[0].suspend()
    time.sleep(1.5)
    children[0].resume()
    asking.join(20)
    worker.limits = LIMITS
    assert isinstance(found[0], Grammar), found


def test_a_task_that_is_cancelled_ends_the_process_that_compiles(worker: GrammarProcess) -> None:
    """Within far less than the seconds that the grammar would take."""
    grammars = Grammars(byte_tokenizer(), worker=worker)

    def compiling() -> int:
        assert worker._process is not None
        return len(psutil.Process(worker._process.pid).children())

    async def until(count: int) -> None:
        end = time.monotonic() + 1
        while compiling() != count:
            assert time.monotonic() < end, f"never {count}"
            await asyncio.sleep(0.005)

    async def cancel() -> None:
        await until(0)  # the first grammar's process is gone
        task = asyncio.create_task(grammars.wait_for(SamplingParams(json_schema=SLOW)))
        await until(1)
        task.cancel()
        with pytest.raises((asyncio.CancelledError, MillpondError)):
            await task
        await until(0)

    try:
        grammars.of(SamplingParams(json_schema=SCHEMA))  # the worker runs
        asyncio.run(cancel())
    finally:
        grammars.close()


def test_a_bystander_goes_on_while_a_schema_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's thread steps; only the one who asked waits."""
    from tests.helpers.evals.small import tiny_model

    async def ask() -> tuple[bool, int]:
        llm = AsyncLLM(tiny_model(), tokenizer=byte_tokenizer(), method="full")
        held = asyncio.Event()

        async def slow(params: SamplingParams) -> None:
            if params.constrained:
                await held.wait()
            return None

        monkeypatch.setattr(llm._engine.grammars, "wait_for", slow)
        monkeypatch.setattr(llm._engine.grammars, "of", lambda params, ask=None: None)
        waits = asyncio.create_task(
            anext(llm.stream(Request(request_id="slow", prompt=(5, 6), params=SamplingParams(json_schema=SCHEMA))))
        )
        free = Request(request_id="free", prompt=(5, 6), params=SamplingParams(max_tokens=4, temperature=0))
        tokens = [output async for output in llm.stream(free)][-1].completions[0].token_ids
        done = waits.done()
        waits.cancel()
        await asyncio.gather(waits, return_exceptions=True)
        await llm.close()
        return done, len(tokens)

    assert asyncio.run(ask()) == (False, 4)
