"""AsyncClusterLLM: `AsyncLLM` over many engines, each in a process of its own; what the server takes."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator
from os import PathLike
from typing import Any, Unpack

from millpond.cluster.figures import ClusterFigures, WorkerInfo
from millpond.cluster.ledger import check_movable
from millpond.cluster.llm import Cluster
from millpond.cluster.settings import ClusterSettings
from millpond.engine.async_llm import Mailbox
from millpond.engine.config import EngineConfig, EngineOptions, takes_engine_options
from millpond.engine.outputs import CacheSnapshot, EngineStats, RequestOutput
from millpond.engine.request import CacheOptions, Request
from millpond.models.load import find_tokenizer


class AsyncClusterLLM:
    """Answers requests of many tasks on several engines; `millpond.cluster.AsyncLLM`, safe to use from any event loop.

    Args:
        model: a name or folder. config: of each engine; None for the defaults.
        model_name: name that clients use; None: the model's own.
        replicas, prefill, decode: numbers of workers; see `ClusterSettings`, as for the next four.
        address: of a running Ray. max_replays: of one request. hang_s: until a worker counts as lost.
        handoff_memory: of requests between two workers.
        dtype, threads: as of `LLM`, for each worker.
        **options: fields of `EngineConfig`, in place of those of `config`; `kv_memory` is that of each worker.

    Raises:
        OptionError, BudgetError, UnsupportedModelError: as `AsyncLLM`; or the extra `cluster` is not installed.
    """

    @takes_engine_options
    def __init__(
        self,
        model: str | PathLike[str],
        config: EngineConfig | None = None,
        *,
        model_name: str | None = None,
        replicas: int | None = None,
        prefill: int | None = None,
        decode: int | None = None,
        address: str | None = None,
        max_replays: int = 2,
        hang_s: float = 120.0,
        handoff_memory: str | int = "256MiB",
        dtype: str | None = None,
        threads: int | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        settings = ClusterSettings(
            replicas=replicas, prefill=prefill, decode=decode, address=address, max_replays=max_replays, hang_s=hang_s,
            handoff_memory=handoff_memory,
        )  # fmt: skip
        cluster = Cluster(settings, model, EngineConfig.of(config, options), dtype, threads)
        self._begin(cluster, model_name or str(model), find_tokenizer(model))

    @classmethod
    def of(cls, cluster: Cluster, model_name: str, tokenizer: Any) -> AsyncClusterLLM:
        """Over workers that are there."""
        made = cls.__new__(cls)
        made._begin(cluster, model_name, tokenizer)
        return made

    def _begin(self, cluster: Cluster, model_name: str, tokenizer: Any) -> None:
        self._cluster, self.model_name, self.tokenizer = cluster, model_name, tokenizer
        model = cluster.dispatcher.model
        assert model is not None, "the workers are open"
        self._context, self._vocabulary, self._cache = model

    @property
    def context_length(self) -> int:
        """Tokens of a prompt and its answer together."""
        return self._context or sys.maxsize

    @property
    def vocab_size(self) -> int:
        """Ids below it are tokens."""
        return self._vocabulary

    @property
    def cache(self) -> CacheOptions:
        """How caches are kept where a request does not say."""
        return self._cache

    @property
    def sessions(self) -> None:
        """None: workers store no sessions."""
        return None

    def stats(self) -> EngineStats:
        """All engines as one."""
        return self._cluster.loop.call(self._cluster.dispatcher.stats).result()

    def workers(self) -> list[WorkerInfo]:
        """All workers: name, role, process, node, state and stats."""
        return self._cluster.loop.call(self._cluster.dispatcher.workers).result()

    def figures(self) -> ClusterFigures:
        """What was moved, replayed and lost since the start."""
        return self._cluster.dispatcher.figures

    def trouble(self, limit_s: float) -> str | None:
        """Which role has no worker that serves; None: all is well. Workers that hang are replaced after `hang_s`."""
        missing = self._cluster.dispatcher.missing()
        return f"no {' and no '.join(missing)} worker serves" if missing else None

    async def stream(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        """See `AsyncLLM.stream`.

        Raises:
            MillpondError: the request is refused, or an error ended it.
        """
        check_movable(request)
        box, dispatcher, loop = Mailbox(asyncio.get_running_loop()), self._cluster.dispatcher, self._cluster.loop

        def deliver(output: RequestOutput) -> None:
            if not box.put(output):
                dispatcher.cancel(request.request_id)

        await asyncio.wrap_future(loop.call(lambda: dispatcher.submit(request, deliver)))
        try:
            while not box.finished:
                output = await box.next()
                assert output is not None, "a request of a cluster ends with an output"
                if output.error is not None:
                    raise output.error
                yield output
        finally:
            if not box.finished:
                loop.call(lambda: dispatcher.cancel(request.request_id))

    async def cancel(self, request_id: str) -> None:
        """End a request with what it has; one that is not there any more is no error."""
        await asyncio.wrap_future(self._cluster.loop.call(lambda: self._cluster.dispatcher.cancel(request_id)))

    async def memory(self, request_id: str, layer: int) -> CacheSnapshot | None:
        """What a layer remembers of a request that runs at a worker; None for others."""
        work = self._cluster.dispatcher.memory(request_id, layer)
        return await asyncio.wrap_future(self._cluster.loop.start(work))

    async def close(self, *, drain: bool = True, timeout: float | None = None) -> None:
        """End all workers; with `drain` what runs may finish first, for `timeout` seconds at most."""
        loop = asyncio.get_running_loop()
        end = None if timeout is None else loop.time() + timeout
        while drain and self._cluster.dispatcher.busy and (end is None or loop.time() < end):
            await asyncio.sleep(0.05)
        await asyncio.to_thread(self._cluster.close)
