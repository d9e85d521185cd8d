"""ClusterLLM: `LLM` over many engines, each in a process of its own, and the cluster that it calls."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from itertools import count
from os import PathLike, fspath
from queue import SimpleQueue
from typing import Any, Self, Unpack

from millpond.cluster.cluster_request import check_movable
from millpond.cluster.dispatcher import Dispatcher
from millpond.cluster.event_loop import LoopThread
from millpond.cluster.ray_worker import RaySession, RayWorker
from millpond.cluster.settings import ClusterSettings
from millpond.cluster.worker_pool import MakeWorker
from millpond.engine.cluster_figures import ClusterFigures, Role, WorkerInfo
from millpond.engine.config import EngineConfig
from millpond.engine.options import ClusterOptions
from millpond.engine.outputs import EngineStats, RequestOutput
from millpond.engine.prompts import Prompts, requests_of
from millpond.engine.request import CacheOptions
from millpond.engine.sampling.params import SamplingParams
from millpond.errors import OptionError
from millpond.prompt_marks import PromptMarks
from millpond.setting import shows_options, split_options


class Cluster:
    """Workers, and the dispatcher that gives them requests.

    Args:
        settings: Settings of the workers.
        model: A name or folder that every worker can open.
        config: Configuration of each engine.
        dtype: As of `LLM`, for each worker.
        threads: As of `LLM`, for each worker.
        make: Makes workers in place of Ray, for tests; None: Ray does.

    Attributes:
        model: The model.
        config: The configuration.

    Raises:
        OptionError, BudgetError, UnsupportedModelError: as `LLM`; or Ray is not there. No process is left.
    """

    def __init__(
        self,
        settings: ClusterSettings,
        model: Any,
        config: EngineConfig,
        dtype: str | None,
        threads: int | None,
        make: MakeWorker | None = None,
    ) -> None:
        if not isinstance(model, str | PathLike):
            raise OptionError("a cluster's workers load the model themselves: give its name or folder")
        if config.chunk_store is not None:
            raise OptionError("chunk_store= belongs to one engine, not to workers: leave it out, or use mp.LLM")
        if config.cache_dir is not None:
            raise OptionError("cache_dir= belongs to one engine, not to workers: leave it out, or use mp.LLM")
        self.model, self.config = fspath(model), config
        self._session: RaySession | None = None
        options = {"config": config, "dtype": dtype, "threads": threads}
        if make is None:
            self._session = session = RaySession(settings.address, len(settings.roles), settings.handoff_bytes)

            def make(name: str, role: Role) -> RayWorker:
                return RayWorker(session.ray, name, role, self.model, options, settings)

        self.dispatcher = Dispatcher(settings, make, config.page_slots)
        self.loop = LoopThread("millpond-cluster")
        self._closing = threading.Lock()
        self._closed = False
        try:
            self.loop.run(self.dispatcher.open())
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End all requests, workers and, if it is its own, Ray."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
            self.loop.run(self.dispatcher.close())
            self.loop.close()
            if self._session is not None:
                self._session.close()


class ClusterClient:
    """A model on several engines, without a way for requests to arrive.

    Its kinds `ClusterLLM` and `AsyncClusterLLM` take requests from one thread and from many tasks; see them for the
    arguments.

    Attributes:
        model_name: Name that clients use.

    Raises:
        OptionError, BudgetError, UnsupportedModelError: as `LLM`; or the extra `cluster` is not installed.
    """

    @shows_options(ClusterSettings, EngineConfig)
    def __init__(
        self,
        model: str | PathLike[str],
        config: EngineConfig | None = None,
        *,
        model_name: str | None = None,
        dtype: str | None = None,
        threads: int | None = None,
        **options: Unpack[ClusterOptions],
    ) -> None:
        workers, engine = split_options(type(self).__name__, options, ClusterSettings, EngineConfig)
        settings = ClusterSettings(**workers)
        cluster = Cluster(settings, model, EngineConfig.of(config, engine), dtype, threads)
        self._begin(cluster, model_name or cluster.model)

    @classmethod
    def of(cls, cluster: Cluster, model_name: str | None = None) -> Self:
        """Return a model over workers that run already."""
        client = cls.__new__(cls)
        client._begin(cluster, model_name or cluster.model)
        return client

    def _begin(self, cluster: Cluster, model_name: str) -> None:
        self._cluster, self.model_name = cluster, model_name

    def stats(self) -> EngineStats:
        """Return the statistics of all engines as one."""
        return self._cluster.loop.call(self._cluster.dispatcher.stats).result()

    def workers(self) -> list[WorkerInfo]:
        """Return all workers: name, role, process, node, state, requests, bytes and stats."""
        return self._cluster.loop.call(self._cluster.dispatcher.workers).result()

    def figures(self) -> ClusterFigures:
        """Return counters of moves, replays and losses since the start."""
        return self._cluster.dispatcher.figures


class ClusterLLM(ClusterClient):
    """A model that answers prompts on several engines; `millpond.cluster.LLM`.

    Args:
        model: A name or folder.
        config: Configuration of each engine; None for the defaults.
        model_name: Name that clients use; None: the model's own.
        dtype: As of `LLM`, for each worker.
        threads: As of `LLM`, for each worker.
        **options: Fields of `ClusterSettings`, and of `EngineConfig` in place of those of `config`; `kv_memory` is that
            of each worker. See docs/reference/settings.md.

    Raises:
        OptionError, BudgetError, UnsupportedModelError: as `LLM`; or the extra `cluster` is not installed.
    """

    def _begin(self, cluster: Cluster, model_name: str) -> None:
        super()._begin(cluster, model_name)
        self._names = count()

    def generate(
        self,
        prompts: Prompts,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache: CacheOptions | None = None,
        marks: PromptMarks | Sequence[PromptMarks] | None = None,
    ) -> list[RequestOutput]:
        """Answer all prompts: the outputs of `LLM.generate`, in the order of the prompts.

        Raises:
            OptionError, BudgetError, UnsupportedModelError: a prompt is refused. MillpondError: an answer was lost
                too often with its worker.
        """
        outputs = self.stream(prompts, params, cache=cache, marks=marks)
        return sorted(outputs, key=lambda output: int(output.request_id))

    def stream(
        self,
        prompts: Prompts,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache: CacheOptions | None = None,
        marks: PromptMarks | Sequence[PromptMarks] | None = None,
    ) -> Iterator[RequestOutput]:
        """Yield each output of `generate` as soon as it is finished."""
        asked = requests_of(prompts, params, cache, self._names, marks)
        for request in asked:
            check_movable(request)
        outputs: SimpleQueue[RequestOutput] = SimpleQueue()
        dispatcher, loop = self._cluster.dispatcher, self._cluster.loop

        def deliver(output: RequestOutput) -> None:
            if output.finished:
                outputs.put(output)

        def submit() -> None:
            for request in asked:
                dispatcher.submit(request, deliver)

        def cancel() -> None:
            for request in asked:
                dispatcher.cancel(request.request_id)

        loop.call(submit).result()
        try:
            for _ in asked:
                output = outputs.get()
                if output.error is not None:
                    raise output.error
                yield output
        finally:
            loop.call(cancel).result()

    def close(self) -> None:
        """End all workers."""
        self._cluster.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
