"""Nothing is lost: a server over Ray's processes whose workers are killed and frozen while 200 clients read."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from queue import SimpleQueue
from typing import Any

import httpx
import pytest

import millpond as mp
from millpond.cluster.async_llm import AsyncClusterLLM
from millpond.cluster.messages import StartMessage
from millpond.engine.outputs import RequestOutput
from millpond.engine.request import Request
from tests.helpers.cluster.chaos import Kind, Stream, Striker, in_loop, read, runs, settled, spilled, stored_bytes
from tests.helpers.server.live import Live

pytest.importorskip("ray")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(2400),
    pytest.mark.filterwarnings("ignore"),  # Ray's own warnings
]

OPTIONS: dict[str, Any] = {"method": "h2o", "budget": 64, "threads": 1, "deterministic": True}
REQUESTS, IN_FLIGHT, TOKENS = 200, 12, 32
MAX_REPLAYS = 3
KINDS: dict[int, Kind] = {3: "leaves", 5: "cancelled", 7: "deadline"}  # by the request's number, modulo 12
LAYOUTS: dict[str, dict[str, Any]] = {
    "replicas": {"replicas": 2},
    "split": {"prefill": 1, "decode": 1, "checkpoint_tokens": 6},
}
PLANS: dict[str, list[Any]] = {
    "replicas": [("replica", signal.SIGKILL), ("replica", signal.SIGSTOP), ("replica", signal.SIGKILL)],
    "split": [
        ("decode", signal.SIGKILL),
        ("prefill", signal.SIGKILL),
        ("decode", signal.SIGSTOP),
        ("prefill", signal.SIGKILL),
        ("decode", signal.SIGKILL),
    ],
}


def body_of(number: int) -> dict[str, Any]:
    """A request: greedy or drawn, of one answer or two, all of them of the same length."""
    words = f"anna{number} kettle{number} " + "quiet rain " * (8 + number % 40)
    body = {
        "prompt": f"{words}<ask> anna{number} <is>",
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "seed": number,
        "temperature": 0.8 * (number % 2),
        "n": 2 if number % 12 == 11 else 1,
    }
    return body | ({"millpond": {"deadline_s": 3.0}} if KINDS.get(number % 12) == "deadline" else {})


def expected(bodies: list[dict[str, Any]]) -> list[list[str]]:
    """The answers of one engine that nobody disturbs."""
    fields = ("max_tokens", "ignore_eos", "seed", "temperature", "n")
    params = [mp.SamplingParams(**{name: body[name] for name in fields}) for body in bodies]
    with mp.LLM("pond-recall", **OPTIONS) as llm:
        outputs = llm.generate([body["prompt"] for body in bodies], params)
    return [[one.text for one in output.completions] for output in outputs]


class Served:
    """A server over workers, with the processes that there ever were."""

    def __init__(self, layout: str) -> None:
        self.layout = layout
        self.llm = AsyncClusterLLM(
            "pond-recall",
            model_name="m",
            max_replays=MAX_REPLAYS,
            hang_s=30.0,
            lease_s=120.0,
            **LAYOUTS[layout],
            **OPTIONS,
        )
        self.pids = {worker.pid for worker in self.llm.workers()}
        self.live = Live(lambda: self.llm, step_limit_s=3600)

    def note(self) -> None:
        self.pids |= {worker.pid for worker in self.llm.workers() if worker.pid}

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.live.url, timeout=None, limits=httpx.Limits(max_connections=None))

    def stop(self) -> None:
        self.note()
        self.live.signal()
        self.live.thread.join()
        while left := [pid for pid in self.pids if runs(pid)]:  # the test's time limit ends it
            os.kill(left[0], 0)


@pytest.fixture(scope="module", params=list(LAYOUTS))
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    server = Served(request.param)
    yield server
    server.stop()


async def check_nothing_is_left(served: Served) -> None:
    await settled(served.llm)
    served.note()
    while stored_bytes():
        await asyncio.sleep(0.1)
    assert not spilled(), "the store was full"


def test_every_stream_ends_with_the_text_of_an_undisturbed_run(served: Served) -> None:
    bodies = [body_of(number) for number in range(REQUESTS)]
    streams = [Stream(body, KINDS.get(number % 12, "whole")) for number, body in enumerate(bodies)]
    wanted, numbers = expected(bodies), count()

    async def work() -> Striker:
        striker = Striker(served.llm, lambda: sum(one.ended for one in streams), REQUESTS // 10)
        async with served.client() as client:

            async def clients() -> None:
                while (number := next(numbers)) < REQUESTS:
                    await read(streams[number], client, served.llm)

            striking = asyncio.create_task(striker.run(PLANS[served.layout]))
            await asyncio.gather(*(clients() for _ in range(IN_FLIGHT)))
            striking.cancel()
            await asyncio.gather(striking, return_exceptions=True)
        await check_nothing_is_left(served)
        return striker

    striker = asyncio.run(work())
    assert [(role, number) for _, role, number in striker.struck] == PLANS[served.layout]
    assert not [pid for pid, _, _ in striker.struck if runs(pid)], "a frozen process is left"
    figures = served.llm.figures()
    print(f"{served.layout}: {figures}")
    assert figures.deaths >= len(striker.struck)
    assert figures.replayed + figures.resumed >= len(striker.struck)
    assert (figures.checkpoints > 0) == ("checkpoint_tokens" in LAYOUTS[served.layout])
    for number, (stream, texts) in enumerate(zip(streams, wanted, strict=True)):
        assert stream.ended, number
        if stream.kind == "deadline" and stream.status == 408:
            continue
        assert (stream.status, stream.error) == (200, None), number
        if stream.kind == "whole":
            assert stream.texts == texts, number
            assert stream.tokens == TOKENS * len(texts), number
            assert set(stream.finish) == {"length"}
        else:
            assert all(text.startswith(found) for text, found in zip(texts, stream.texts, strict=True)), number
            assert stream.tokens is None or stream.tokens <= TOKENS * len(texts)


def test_a_prompt_that_kills_its_worker_ends_alone(served: Served) -> None:
    """It does so before it has a token, with six others beside it that are no further."""
    bodies = [body_of(number) for number in (300, 301, 302, 304, 306, 308, 310)]
    poison, deaths = 3, served.llm.figures().deaths
    streams = [Stream(body) for body in bodies]
    wanted = expected(bodies)
    outgoing = served.llm._cluster.dispatcher._outgoing
    send, texts = outgoing.send, bodies[poison]["prompt"]
    length = len(served.llm.tokenizer(texts)["input_ids"])

    def deadly(handle: Any, start: StartMessage) -> None:
        request = start.request
        if request.params.seed == bodies[poison]["seed"]:
            assert len(request.prompt) >= length - 1
            os.kill(handle.pid, signal.SIGKILL)
        send(handle, start)

    async def work() -> None:
        async with served.client() as client:
            await asyncio.gather(*(read(one, client, served.llm) for one in streams))
        await check_nothing_is_left(served)

    outgoing.send = deadly  # type: ignore[method-assign]
    try:
        asyncio.run(work())
    finally:
        outgoing.send = send  # type: ignore[method-assign]
    assert served.llm.figures().deaths == deaths + MAX_REPLAYS + 1
    for number, (stream, found) in enumerate(zip(streams, wanted, strict=True)):
        if number == poison:
            assert f"lost {MAX_REPLAYS + 1} times" in (stream.error or ""), stream
        else:
            assert (stream.error, stream.texts) == (None, found), number


def test_with_copies_no_prompt_is_read_again(served: Served) -> None:
    """A request loses the worker at which it decodes; the others read its prompt, or do not."""
    body, killed, outputs = body_of(301), threading.Event(), SimpleQueue[RequestOutput]()
    dispatcher, copies = served.llm._cluster.dispatcher, "checkpoint_tokens" in LAYOUTS[served.layout]
    params = mp.SamplingParams(max_tokens=96, temperature=0.8, seed=4, ignore_eos=True)
    request = Request(request_id="long", prompt=body["prompt"], params=params)
    with mp.LLM("pond-recall", **OPTIONS) as llm:
        (whole,) = llm.generate([body["prompt"]], params)
    before = replace(served.llm.figures())

    def deliver(output: RequestOutput) -> None:
        outputs.put(output)
        held = dispatcher.checkpoints._copies.get("long")
        entry = dispatcher._entries.get("long")
        if entry is None or entry.worker is None or entry.place != "running" or killed.is_set():
            return
        if entry.length >= 12 and (not copies or (held is not None and held.key is not None)):
            killed.set()
            pid = dispatcher._pool.serving[entry.worker].pid
            served.pids.add(pid)
            os.kill(pid, signal.SIGKILL)

    served.llm._cluster.loop.call(lambda: dispatcher.submit(request, deliver)).result()
    read_at = {}
    while not (last := outputs.get()).finished:
        pass
    assert killed.is_set()
    assert last.error is None
    assert last.completions[0].token_ids == whole.completions[0].token_ids
    figures = served.llm.figures()
    assert figures.deaths == before.deaths + 1
    assert figures.resumed - before.resumed == int(copies)
    assert figures.replayed - before.replayed == int(not copies)
    asyncio.run(check_nothing_is_left(served))
    read_at = asyncio.run(
        in_loop(
            served.llm,
            lambda dispatcher: {
                one.name: one.stats.prompt_tokens for one in dispatcher.workers() if one.stats is not None
            },
        )
    )
    if copies:
        decode = [tokens for name, tokens in read_at.items() if name.startswith("decode")]
        assert decode == [0], "the one in its place reads no prompt"
