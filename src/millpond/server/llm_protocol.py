"""Protocols of the engine that the server needs, of one process or of several workers."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from millpond.engine.cluster_figures import ClusterFigures, DrainResult, Role, WorkerInfo
from millpond.engine.outputs import CacheSnapshot, EngineStats, RequestOutput
from millpond.engine.request import CacheOptions, Request
from millpond.engine.sessions.store import SessionStore
from millpond.images.reader import ImageReader


class ServedLLM(Protocol):
    """One model with its engine.

    Attributes:
        tokenizer: Tokenizer of transformers.
        images: Reads images for the model; None: it takes text alone.
        model_name: Name for clients.
        vocab_size: Ids below it are tokens.
        context_length: Tokens that the model sees at a time.
        text_limit: Tokens of prompt and answer together: as many, or any number where texts go on beyond the context.
        cache: How caches are kept where a request does not say.
        sessions: Finished turns that later requests continue; None: none are stored.
    """

    @property
    def tokenizer(self) -> Any: ...

    @property
    def images(self) -> ImageReader | None: ...

    @property
    def model_name(self) -> str: ...

    @property
    def context_length(self) -> int: ...

    @property
    def text_limit(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def cache(self) -> CacheOptions: ...

    @property
    def sessions(self) -> SessionStore | None: ...

    def stream(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        """Yield the answers of a request as they grow.

        Closing the generator cancels the request and frees its pages.
        """
        ...

    async def cancel(self, request_id: str) -> None:
        """End a request with what it has; one that is not there any more is no error."""
        ...

    def stats(self) -> EngineStats:
        """Return the engine's numbers at this moment."""
        ...

    def trouble(self, limit_s: float) -> str | None:
        """Return why nothing moves; None: all is well.

        The engine ended, or one step takes more than `limit_s` seconds.
        """
        ...

    @property
    def step_age_s(self) -> float:
        """Seconds since the step began that the engine is at; 0 where it waits."""
        ...

    async def memory(self, request_id: str, layer: int, client: str | None = None) -> CacheSnapshot | None:
        """Return what one layer remembers of a request's first answer; None if it is not known.

        It is not known to clients other than `client` either.
        """
        ...

    async def close(self, *, drain: bool = True, timeout: float | None = None) -> None:
        """Stop within `timeout` seconds; with `drain` what runs may finish first."""
        ...


@runtime_checkable
class ServedCluster(ServedLLM, Protocol):
    """A `ServedLLM` of several workers."""

    def workers(self) -> Sequence[WorkerInfo]:
        """Return all workers."""
        ...

    def live(self) -> Mapping[str, int]:
        """Return numbers of workers that take new requests, by role; 0 if there is none."""
        ...

    def figures(self) -> ClusterFigures:
        """Return counters of moves, replays and losses."""
        ...

    async def drain(self, worker: str, *, replace: bool = True, role: Role | None = None) -> DrainResult:
        """Give the requests of a worker to others, and end it.

        Another one starts in its place, of its role or of `role`.

        Raises:
            OptionError: there is no such worker or role, or none of its role would be left.
        """
        ...
