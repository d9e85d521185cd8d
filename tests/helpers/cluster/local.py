"""Workers of a cluster in this process, which die when a test says so."""

from __future__ import annotations

import asyncio
import copy
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

import numpy as np

from millpond.cluster.handle import WorkerLostError
from millpond.cluster.llm import Cluster, ClusterLLM
from millpond.cluster.messages import StartMessage, WorkerReport
from millpond.cluster.settings import ClusterSettings
from millpond.cluster.worker import EngineWorker
from millpond.engine.cluster_figures import Role
from millpond.engine.config import EngineConfig
from millpond.engine.outputs import RequestOutput
from millpond.engine.request import Request
from tests.helpers.hf.families import shared_model

#: Called with each report of a worker before the dispatcher has it.
Watch = Callable[["LocalWorker", WorkerReport], None]


class LocalWorker:
    """See `WorkerHandle`. Reports come without waiting, so that a test decides what happens between two."""

    def __init__(self, name: str, role: Role, settings: ClusterSettings, watch: Watch, options: dict[str, Any]) -> None:
        self.name, self.role, self.pid, self.node = name, role, 1, "here"
        self.dead = asyncio.Event()
        self.sent: list[Request] = []  # noted before the engine has them
        self.messages: list[int] = []  # numbers of requests in each message
        self.taken: list[str] = []
        self.resumed: list[Request] = []
        self.refuses: list[Exception] = []  # what the next calls of `take` raise
        self.hold = 0  # tokens of an answer at which its engine waits for `go`; 0: it never waits
        self.paused = False  # whether its engine waits for `go` before any step that has a request
        self.go = threading.Event()
        self.answers = True  # whether calls of `take` are done before `answer_now`
        self.late = False  # whether calls of `take` and `resume`, which were done, are answered only then
        self._answer = asyncio.Event()
        self.on_take: Callable[[LocalWorker], None] = lambda source: None  # before bytes are pulled from a worker
        self._watch = watch
        model = copy.deepcopy(shared_model("llama"))
        self.engine = EngineWorker(model, options, role, settings)

    def die(self) -> None:
        """No call is answered any more; the engine goes, and what it held."""
        self.go.set()
        if not self.dead.is_set():
            self.dead.set()
            if self.engine._opened is not None:
                self._ended = asyncio.get_running_loop().create_task(self.engine.close())

    def answer_now(self) -> None:
        """Answer the calls that wait."""
        self._answer.set()

    async def _of(self, work: Coroutine[Any, Any, Any]) -> Any:
        """The answer of a call, or the loss of the worker, whichever comes first."""
        task, gone = asyncio.ensure_future(work), asyncio.ensure_future(self.dead.wait())
        await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()
        if self.dead.is_set():
            task.cancel()
            raise WorkerLostError(f"{self.name} died")
        return await task

    async def open(self) -> Any:
        _, *model = await self._of(self.engine.open())
        engine, step = self.engine._llm._engine, self.engine._llm._engine.step

        def held_step() -> list[RequestOutput]:
            held = self.hold and any(len(one.completions[0].tokens) >= self.hold for one in engine._requests)
            if (held or (self.paused and engine._requests)) and not self.go.wait(0.005):
                return []  # so that calls of the engine go on
            return step()

        engine.step = held_step  # type: ignore[method-assign]
        return tuple(model)

    async def start(self, starts: Sequence[StartMessage]) -> None:
        self.messages.append(len(starts))
        self.sent += [start.request for start in starts]
        await self._of(self.engine.start(starts))

    async def report(self, wanted: frozenset[str]) -> WorkerReport:
        found: WorkerReport = await self._of(self.engine.report(wanted))
        self._watch(self, found)
        if self.dead.is_set():
            raise WorkerLostError(f"{self.name} died before its report came")
        return found

    async def offer(self, name: str) -> Any:
        return await self._of(self.engine.offer(name))

    async def cancel(self, name: str) -> None:
        await self._of(self.engine.cancel(name))

    def offered(self, name: str) -> Any:
        return self, name

    async def take(self, name: str, offered: Any) -> None:
        if self.refuses:
            raise self.refuses.pop(0)
        source, of = offered
        self.on_take(source)
        data = await source._of(source.engine.fetch(of))
        if not self.answers:
            await self._answer.wait()
        await self._of(self.engine.take(name, data))
        self.taken.append(name)
        if self.late:
            await self._answer.wait()

    async def checkpoint(self, name: str) -> bytes | None:
        found = await self._of(self.engine.checkpoint(name))
        return None if found is None else bytes(found)

    async def resume(self, request: Request, data: bytes) -> None:
        if self.refuses:
            raise self.refuses.pop(0)
        self.resumed.append(request)
        await self._of(self.engine.resume(request, np.frombuffer(data, dtype=np.uint8)))
        if self.late:
            await self._answer.wait()

    async def release(self, name: str) -> None:
        await self._of(self.engine.release(name))

    async def memory(self, name: str, layer: int) -> Any:
        return await self._of(self.engine.memory(name, layer))

    async def call(self, function: Callable[..., Awaitable[Any]], *args: Any) -> Any:
        return await self._of(self.engine.call(function, *args))

    async def close(self) -> None:
        self.go.set()
        await self._of(self.engine.close())

    def kill(self) -> None:
        self.die()


class LocalCluster:
    """A cluster of such workers: `made` holds all that there ever were, `holds` says `hold` of the first of them."""

    def __init__(
        self,
        watch: Watch | None = None,
        engine: dict[str, Any] | None = None,
        slots: int = 4,
        holds: Sequence[int] = (),
        **settings: Any,
    ) -> None:
        self.made: list[LocalWorker] = []
        chosen = ClusterSettings(**settings)
        options = {"method": "h2o", "budget": "30%", "max_step_tokens": 16, "page_slots": 4} | (engine or {})

        def make(name: str, role: Role) -> LocalWorker:
            worker = LocalWorker(name, role, chosen, watch or (lambda *_: None), options)
            worker.hold = holds[len(self.made)] if len(self.made) < len(holds) else 0
            self.made.append(worker)
            return worker

        self.cluster = Cluster(chosen, "local", EngineConfig(page_slots=slots), None, None, make)
        self.llm = ClusterLLM.of(self.cluster, "tiny")

    def __enter__(self) -> LocalCluster:
        return self

    def __exit__(self, *exception: object) -> None:
        self.cluster.close()

    def generate(
        self, prompts: Any, params: Any, see: Callable[[RequestOutput, LocalWorker | None], None]
    ) -> list[RequestOutput]:
        """As `ClusterLLM.generate`; all outputs on the way are shown to `see`, with the worker that has the request."""
        dispatcher = self.cluster.dispatcher
        submit = dispatcher.submit

        def watched(request: Request, deliver: Callable[[RequestOutput], None]) -> None:
            def both(output: RequestOutput) -> None:
                entry = dispatcher._entries.get(output.request_id)
                at = None if entry is None else entry.worker
                see(output, next((one for one in self.made if one.name == at), None))
                deliver(output)

            submit(request, both)

        dispatcher.submit = watched  # type: ignore[method-assign]
        return self.llm.generate(prompts, params)

    def wait_until(self, holds: Callable[[], Any]) -> None:
        """Wait until something holds in the cluster's loop; a test's time limit ends it."""
        while not self.cluster.loop.call(holds).result():
            time.sleep(0.002)

    def figure(self, name: str, value: int) -> None:
        """Wait until a counter has a value: a worker's answer that it took a request may come behind its tokens."""
        self.wait_until(lambda: getattr(self.cluster.dispatcher.figures, name) == value)

    def settle(self) -> None:
        """Wait until no worker that lives holds a page, a request or bytes of one; a test's time limit ends it."""
        while not self.cluster.loop.run(self._is_empty()):
            pass

    async def _is_empty(self) -> bool:
        await asyncio.sleep(0.005)
        alive = [one.engine for one in self.made if not one.dead.is_set() and one.engine._opened is not None]
        return all(
            not one._handoff.size
            and not one._tasks
            and not one._left
            and not one._newest
            and not one._reported
            and not one._llm._engine._requests
            and not one._llm._engine.busy
            for one in alive
        )
