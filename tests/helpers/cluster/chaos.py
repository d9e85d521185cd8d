"""Clients of a server over workers, and what happens to its workers meanwhile."""

from __future__ import annotations

import asyncio
import glob
import json
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx
import psutil

from millpond.cluster.async_llm import AsyncClusterLLM
from millpond.cluster.dispatcher import Dispatcher
from millpond.engine.cluster_figures import Role

#: Events of an answer after which a client closes its connection, or its request is cancelled.
LEAVES_AFTER = 4
#: Seconds until a client that was refused since a role had no worker tries again.
_RETRY_S = 0.5

Kind = Literal["whole", "leaves", "cancelled", "deadline"]


@dataclass
class Stream:
    """One request, and what its client read.

    Attributes:
        texts, finish: of each answer. tokens: as its usage says; None: it did not come. ended: by an end of the stream,
            or by its client. status: of the response. error: of the stream.
    """

    body: dict[str, Any]
    kind: Kind = "whole"
    texts: list[str] = field(default_factory=list)
    finish: list[str | None] = field(default_factory=list)
    tokens: int | None = None
    ended: bool = False
    status: int = 0
    error: str | None = None

    def __post_init__(self) -> None:
        number = self.body.get("n", 1)
        self.texts, self.finish = [""] * number, [None] * number


async def read(stream: Stream, client: httpx.AsyncClient, llm: AsyncClusterLLM) -> None:
    """Send a request and read its answer to the end, or as far as its kind says."""
    body = stream.body | {"stream": True, "stream_options": {"include_usage": True}}
    while stream.status in (0, 503):
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            stream.status = answer.status_code
            if stream.status == 200:
                await _read_events(stream, answer, llm)
                return
            stream.error = (await answer.aread()).decode()
        await asyncio.sleep(_RETRY_S)
    stream.ended = True


async def _read_events(stream: Stream, answer: httpx.Response, llm: AsyncClusterLLM) -> None:
    stream.error, events = None, 0
    async for line in answer.aiter_lines():
        if not line:
            continue
        data = line.removeprefix("data: ")
        if data == "[DONE]":
            stream.ended = True
            return
        event = json.loads(data)
        if "error" in event:
            stream.error = event["error"]["message"]
            stream.ended = True
            return
        if event.get("usage"):
            stream.tokens = event["usage"]["completion_tokens"]
        for choice in event["choices"]:
            stream.texts[choice["index"]] += choice["text"]
            stream.finish[choice["index"]] = choice["finish_reason"]
        events += 1
        if events == LEAVES_AFTER and stream.kind == "leaves":
            stream.ended = True
            return
        if events == LEAVES_AFTER and stream.kind == "cancelled":
            await llm.cancel(event["id"])


class Striker:
    """Ends or freezes processes of workers, one after another, each when its requests have come somewhere.

    Args:
        answered: number of streams that have ended. gap: more of them between two strikes.

    Attributes:
        struck: process, role and signal of each strike.
    """

    def __init__(self, llm: AsyncClusterLLM, answered: Callable[[], int], gap: int) -> None:
        self.struck: list[tuple[int, Role, signal.Signals]] = []
        self._llm, self._answered, self._gap = llm, answered, gap

    async def run(self, plan: list[tuple[Role, signal.Signals]]) -> None:
        """Strike in turn, until the plan is at its end."""
        for role, number in plan:
            at = self._answered() + self._gap
            while self._answered() < at or (pid := await self._victim(role)) is None:
                await asyncio.sleep(0.02)
            self.struck.append((pid, role, number))
            os.kill(pid, number)

    async def _victim(self, role: Role) -> int | None:
        return await in_loop(self._llm, lambda dispatcher: self._choose(dispatcher, role))

    def _choose(self, dispatcher: Dispatcher, role: Role) -> int | None:
        """A worker that is in the middle of something, while no request was lost twice without a token since."""
        if any(entry.replays > 1 for entry in dispatcher._entries.values()):
            return None
        gone = {pid for pid, _, _ in self.struck}
        for worker in dispatcher._pool.able(role):
            here = dispatcher.requests_of(worker.name)
            if worker.pid not in gone and any(entry.begun or role == "prefill" for entry in here):
                return worker.pid
        return None


async def in_loop(llm: AsyncClusterLLM, ask: Callable[[Dispatcher], Any]) -> Any:
    """The result of a call in the loop of a cluster."""
    dispatcher = llm._cluster.dispatcher
    return await asyncio.wrap_future(llm._cluster.loop.call(lambda: ask(dispatcher)))


async def settled(llm: AsyncClusterLLM) -> None:
    """Wait until all workers serve and none has anything; a test's time limit ends it."""
    roles = len(llm._cluster.dispatcher._settings.roles)

    def rests(dispatcher: Dispatcher) -> bool:
        found = dispatcher.workers()
        return (
            not dispatcher.busy
            and dispatcher.checkpoints.size == 0
            and len(found) == roles
            and all(
                one.state == "serving"
                and one.stats is not None
                and not one.handoff_bytes
                and one.stats.kv_bytes == one.stats.running == one.stats.waiting == one.stats.swapped == 0
                for one in found
            )
        )

    while not await in_loop(llm, rests):
        await asyncio.sleep(0.05)


def stored_bytes() -> int:
    """Bytes in the object store of the Ray of this process."""
    import ray

    name = "object_store_memory"
    return int(ray.cluster_resources()[name] - ray.available_resources()[name])


def spilled() -> list[str]:
    """Files that the object store of the private Ray of this process wrote since it was full."""
    import ray

    folder = ray._private.worker._global_node.get_session_dir_path()
    return glob.glob(f"{folder}/**/ray_spilled_objects*/*", recursive=True)


def runs(pid: int) -> bool:
    """Whether a process is there; one that has ended and was not waited for is not."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
