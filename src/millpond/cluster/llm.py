"""ClusterLLM: `LLM` over many engines, each in a process of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from queue import SimpleQueue
from typing import Self

from millpond.cache.state.span_marks import FairShare
from millpond.cache.state.spans import Span
from millpond.cluster.client import Cluster, ClusterClient
from millpond.cluster.ledger import check_movable
from millpond.engine.outputs import RequestOutput
from millpond.engine.prompts import Prompts, requests_of
from millpond.engine.request import CacheOptions, OnPressure
from millpond.engine.sampling.params import SamplingParams


class ClusterLLM(ClusterClient):
    """A model that answers prompts on several engines; `millpond.cluster.LLM`.

    Args:
        model: a name or folder. config: of each engine; None for the defaults.
        model_name: name that clients use; None: the model's own.
        replicas, prefill, decode: numbers of workers; see `ClusterSettings`, as for the next six.
        address: of a running Ray. max_replays: of one request. hang_s: until a worker counts as lost.
        handoff_memory: of requests between two workers. lease_s: in which they must be fetched.
        checkpoint_tokens: after which the cache of a request is copied; None: never.
        dtype, threads: as of `LLM`, for each worker.
        **options: fields of `EngineConfig`, in place of those of `config`; `kv_memory` is that of each worker.

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
        keep: Sequence[Span] = (),
        fair_shares: Sequence[FairShare] = (),
        forget: Sequence[Span] = (),
        on_pressure: OnPressure | None = None,
    ) -> list[RequestOutput]:
        """Answer all prompts: the outputs of `LLM.generate`, in the order of the prompts.

        Raises:
            OptionError, BudgetError, UnsupportedModelError: a prompt is refused. MillpondError: an answer was lost
                too often with its worker.
        """
        found = self.stream(
            prompts, params, cache=cache, keep=keep, fair_shares=fair_shares, forget=forget, on_pressure=on_pressure
        )
        return sorted(found, key=lambda output: int(output.request_id))

    def stream(
        self,
        prompts: Prompts,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache: CacheOptions | None = None,
        keep: Sequence[Span] = (),
        fair_shares: Sequence[FairShare] = (),
        forget: Sequence[Span] = (),
        on_pressure: OnPressure | None = None,
    ) -> Iterator[RequestOutput]:
        """As `generate`, each output as soon as it is finished."""
        asked = requests_of(
            prompts,
            params,
            cache,
            self._names,
            keep=keep,
            fair_shares=fair_shares,
            forget=forget,
            on_pressure=on_pressure,
        )
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
