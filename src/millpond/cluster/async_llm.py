"""AsyncClusterLLM: `AsyncLLM` over many engines, each in a process of its own; what the server takes."""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self, TypeVar, TypeVarTuple

from millpond.cluster.cluster_request import check_movable
from millpond.cluster.event_loop import LoopThread
from millpond.cluster.llm import Cluster, ClusterClient
from millpond.engine.async_llm import AsyncLLM
from millpond.engine.cluster_figures import DrainResult, Role
from millpond.engine.mailbox import Mail, Mailbox, deliver
from millpond.engine.outputs import CacheSnapshot, RequestOutput
from millpond.engine.request import CacheOptions, Request
from millpond.errors import OptionError
from millpond.models.load import find_tokenizer


class Outbox:
    """Outputs for tasks of other event loops; a worker's report carries those of all requests.

    Args:
        cancel: Called with the id of a request whose reader is gone, with its loop.
    """

    def __init__(self, cancel: Callable[[str], None]) -> None:
        self._cancel = cancel
        self._mail: list[Mail] = []

    def put(self, mailbox: Mailbox, output: RequestOutput) -> None:
        """Send an output at the end of this pass of the loop that is running."""
        if not self._mail:
            asyncio.get_running_loop().call_soon(self._send)
        self._mail.append((mailbox, output))

    def _send(self) -> None:
        mail, self._mail = self._mail, []
        for _, output in deliver(mail):
            if not output.finished:
                self._cancel(output.request_id)


T = TypeVar("T")


@dataclass(slots=True)
class _Call:
    function: Callable[[], Any]
    answer: asyncio.Future[Any]
    result: Any = None
    error: Exception | None = None


class BatchedCalls:
    """Calls into one loop, safe from any loop; requests sent at once arrive together."""

    def __init__(self, loop: LoopThread) -> None:
        self._loop = loop
        self._waiting: dict[asyncio.AbstractEventLoop, list[_Call]] = {}  # each touched by its own loop only

    async def call(self, function: Callable[[], T]) -> T:
        """Call a function in the loop, and return what it returns.

        Cancelled in the pass in which it was made, it is not called at all.

        Raises:
            Exception: what the function raises.
        """
        loop = asyncio.get_running_loop()
        call = _Call(function, loop.create_future())
        if loop not in self._waiting:
            self._waiting[loop] = []
            loop.call_soon(self._send, loop)
        self._waiting[loop].append(call)
        result: T = await call.answer
        return result

    def _send(self, loop: asyncio.AbstractEventLoop) -> None:
        calls = [call for call in self._waiting.pop(loop) if not call.answer.cancelled()]
        if calls:
            self._loop.call(lambda: _make(calls, loop))


def _make(calls: Sequence[_Call], home: asyncio.AbstractEventLoop) -> None:
    for call in calls:
        try:
            call.result = call.function()
        except Exception as error:
            call.error = error
    try:
        home.call_soon_threadsafe(_answer, calls)
    except RuntimeError:  # that loop is closed, and nothing waits there any more
        return


def _answer(calls: Sequence[_Call]) -> None:
    for call in calls:
        if call.answer.cancelled():
            continue
        if call.error is not None:
            call.answer.set_exception(call.error)
        else:
            call.answer.set_result(call.result)


Args = TypeVarTuple("Args")


class AsyncClusterLLM(ClusterClient):
    """Answers requests of many tasks on several engines, from any event loop.

    It is `millpond.cluster.AsyncLLM`.

    Args:
        model: A name or folder.
        config: Configuration of each engine; None for the defaults.
        model_name: Name that clients use; None: the model's own.
        dtype: As of `LLM`, for each worker.
        threads: As of `LLM`, for each worker.
        **options: Fields of `ClusterSettings`, and of `EngineConfig` in place of those of `config`; `kv_memory` is that
            of each worker. See docs/reference/settings.md.

    Raises:
        OptionError, BudgetError, UnsupportedModelError: as `AsyncLLM`; or the extra `cluster` is not installed.
    """

    @classmethod
    def of(cls, cluster: Cluster, model_name: str | None = None, tokenizer: Any = None) -> Self:
        """Return a model over workers that run already.

        Args:
            cluster: The workers.
            model_name: Name for clients.
            tokenizer: Tokenizer of the model; None: that of its folder.
        """
        client = super().of(cluster, model_name)
        if tokenizer is not None:
            client.tokenizer = tokenizer
        return client

    @property
    def images(self) -> None:
        """None: requests with images move to no other worker, so none are taken."""
        return None

    @cached_property
    def tokenizer(self) -> Any:
        """The model's tokenizer, or None."""
        return find_tokenizer(self._cluster.model, trust_remote_code=self._cluster.config.trust_remote_code)

    def _begin(self, cluster: Cluster, model_name: str) -> None:
        super()._begin(cluster, model_name)
        model = cluster.dispatcher.model
        assert model is not None, "the workers are open"
        self._context, self._vocabulary, self._cache = model
        self._calls, self._outbox = BatchedCalls(self._cluster.loop), Outbox(self._cluster.dispatcher.cancel)

    @property
    def context_length(self) -> int:
        """Tokens that the model sees at a time."""
        return self._context or sys.maxsize

    @property
    def text_limit(self) -> int:
        """Tokens of a prompt and its answer together."""
        return sys.maxsize if self._cluster.config.overflow == "rolling" else self.context_length

    @property
    def vocab_size(self) -> int:
        """Ids below it are tokens."""
        return self._vocabulary

    @property
    def cache(self) -> CacheOptions:
        """How caches are kept where a request does not say."""
        return self._cache

    def live(self) -> dict[Role, int]:
        """Return numbers of workers that take new requests, by role; 0 if there is none."""
        return self._cluster.dispatcher.live()

    @property
    def sessions(self) -> None:
        """None: workers store no sessions."""
        return None

    def trouble(self, limit_s: float) -> str | None:
        """Return which role has no worker that serves; None: all is well.

        Workers that hang are replaced after `hang_s`.
        """
        missing = [role for role, number in self.live().items() if not number]
        return f"no {' and no '.join(missing)} worker serves" if missing else None

    @property
    def step_age_s(self) -> float:
        """Seconds that the longest step of a worker has taken, as of its last report."""
        return self._cluster.dispatcher.step_age_s

    async def stream(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        """See `AsyncLLM.stream`.

        Raises:
            MillpondError: the request is refused, or an error ended it.
        """
        check_movable(request)
        mailbox, dispatcher, loop = Mailbox(asyncio.get_running_loop()), self._cluster.dispatcher, self._cluster.loop

        def deliver(output: RequestOutput) -> None:
            self._outbox.put(mailbox, output)

        try:
            await self._calls.call(lambda: dispatcher.submit(request, deliver))
        except asyncio.CancelledError:  # it may have been submitted all the same
            loop.call(lambda: dispatcher.cancel(request.request_id))
            raise
        try:
            while not mailbox.finished:
                output = await mailbox.next()
                assert output is not None, "a request of a cluster ends with an output"
                if output.error is not None:
                    raise output.error
                yield output
        finally:
            if not mailbox.finished:
                loop.call(lambda: dispatcher.cancel(request.request_id))

    async def cancel(self, request_id: str) -> None:
        """End a request with what it has; one that is not there any more is no error."""
        await asyncio.wrap_future(self._cluster.loop.call(lambda: self._cluster.dispatcher.cancel(request_id)))

    async def memory(self, request_id: str, layer: int, client: str | None = None) -> CacheSnapshot | None:
        """Return what a layer remembers of a request that runs; None for others.

        See `Engine.memory`.
        """
        work = self._cluster.dispatcher.memory(request_id, layer, client)
        return await asyncio.wrap_future(self._cluster.loop.start(work))

    async def drain(self, worker: str, *, replace: bool = True, role: Role | None = None) -> DrainResult:
        """Give the requests of a worker to others, without an end of any of them, and end it.

        Args:
            worker: Its name.
            replace: Start another one; False: there is one less from then on.
            role: Role of the other one, prefill or decode in a split cluster; None: that of the worker.

        Raises:
            OptionError: there is no such worker, it is the last of its role and none of that is started, or the
                cluster has no such role.
            MillpondError: the one in its place does not start, where it is the last one of its role or that changes.
        """
        work = self._cluster.dispatcher.drain(worker, replaced=replace, role=role)
        return await asyncio.wrap_future(self._cluster.loop.start(work))

    async def call_workers(
        self, function: Callable[[AsyncLLM, *Args], Awaitable[T]], *args: *Args, most: int | None = None
    ) -> list[T]:
        """Await a function in the workers' processes, at once, with the `AsyncLLM` of each.

        Requests continue meanwhile. It is for the owner of the cluster, such as a measurement; nothing in a request or
        over HTTP leads here.

        Args:
            function: An async one at the top of a module, which the workers import by its name.
            *args: Passed after the `AsyncLLM`; like what it returns they go from process to process as pickles.
            most: Most workers to call, the first by name; None: all that serve.

        Returns:
            The result of each, by the names of the workers.

        Raises:
            OptionError: the function is not async, or workers cannot import it.
            WorkerLostError: a worker was lost.
            MillpondError: the function failed. The other workers are not stopped.
        """
        _check_importable(function)

        async def call() -> list[T]:
            handles = self._cluster.dispatcher.serving[:most]
            return list(await asyncio.gather(*(handle.call(function, *args) for handle in handles)))

        return await asyncio.wrap_future(self._cluster.loop.start(call()))

    async def close(self, *, drain: bool = True, timeout: float | None = None) -> None:
        """End all workers; with `drain` what runs may finish first, for `timeout` seconds at most."""
        loop = asyncio.get_running_loop()
        end = None if timeout is None else loop.time() + timeout
        while drain and self._cluster.dispatcher.busy and (end is None or loop.time() < end):
            await asyncio.sleep(0.05)
        await asyncio.to_thread(self._cluster.close)


def _check_importable(function: Callable[..., Any]) -> None:
    """Check that workers can import a function by its name.

    Raises:
        OptionError: it is not async, or its name in its module does not mean it.
    """
    name = str(getattr(function, "__qualname__", function))
    if getattr(sys.modules.get(function.__module__), name, None) is not function:
        raise OptionError(f"{name} is not at the top of a module, where workers find it: define it there")
    if not inspect.iscoroutinefunction(function):
        raise OptionError(f"{name} is not async, and workers await it: define it with async def")
