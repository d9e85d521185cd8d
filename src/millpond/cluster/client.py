"""Cluster and ClusterClient: workers with their dispatcher, and what every caller of a cluster has in common."""

from __future__ import annotations

import threading
from os import PathLike, fspath
from typing import Any, Self, Unpack

from millpond.cluster.dispatcher import Dispatcher
from millpond.cluster.figures import ClusterFigures, WorkerInfo
from millpond.cluster.loop_thread import LoopThread
from millpond.cluster.ray_session import RaySession
from millpond.cluster.ray_worker import RayWorker
from millpond.cluster.roles import Role
from millpond.cluster.settings import ClusterSettings
from millpond.cluster.worker_pool import MakeWorker
from millpond.engine.config import EngineConfig, EngineOptions, takes_engine_options
from millpond.engine.outputs import EngineStats
from millpond.errors import OptionError


class Cluster:
    """Workers, and the dispatcher that gives them requests.

    Args:
        settings: of the workers. model: a name or folder that every worker can open. config: of each engine.
        dtype, threads: as of `LLM`, for each worker.
        make: makes workers in place of Ray, for tests; None: Ray does.

    Attributes:
        model, config: as given.

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
            raise OptionError("chunk_store= is that of one engine, workers share none: leave it out, or use mp.LLM")
        if config.cache_dir is not None:
            raise OptionError("cache_dir= is that of one engine, workers share none: leave it out, or use mp.LLM")
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
    """A model on several engines, before it is said how requests come: from one thread or from many tasks.

    Args: see `ClusterSettings` and `LLM`; those of its two kinds, `ClusterLLM` and `AsyncClusterLLM`.

    Attributes:
        model_name: name that clients use.

    Raises:
        OptionError, BudgetError, UnsupportedModelError: as `LLM`; or the extra `cluster` is not installed.
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
        lease_s: float = 10.0,
        checkpoint_tokens: int | None = None,
        dtype: str | None = None,
        threads: int | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        settings = ClusterSettings(
            replicas=replicas,
            prefill=prefill,
            decode=decode,
            address=address,
            max_replays=max_replays,
            hang_s=hang_s,
            handoff_memory=handoff_memory,
            lease_s=lease_s,
            checkpoint_tokens=checkpoint_tokens,
        )
        cluster = Cluster(settings, model, EngineConfig.of(config, options), dtype, threads)
        self._begin(cluster, model_name or cluster.model)

    @classmethod
    def of(cls, cluster: Cluster, model_name: str | None = None) -> Self:
        """Over workers that are there."""
        made = cls.__new__(cls)
        made._begin(cluster, model_name or cluster.model)
        return made

    def _begin(self, cluster: Cluster, model_name: str) -> None:
        self._cluster, self.model_name = cluster, model_name

    def stats(self) -> EngineStats:
        """All engines as one."""
        return self._cluster.loop.call(self._cluster.dispatcher.stats).result()

    def workers(self) -> list[WorkerInfo]:
        """All workers: name, role, process, node, state, requests, bytes and stats."""
        return self._cluster.loop.call(self._cluster.dispatcher.workers).result()

    def figures(self) -> ClusterFigures:
        """What was moved, replayed and lost since the start."""
        return self._cluster.dispatcher.figures
