"""Protocol of the engine that the server needs; `millpond.engine.async_llm.AsyncLLM` has it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, Protocol

from millpond.engine.outputs import CacheSnapshot, EngineStats, RequestOutput
from millpond.engine.request import CacheOptions, Request
from millpond.engine.sessions.store import SessionStore


class ServedLLM(Protocol):
    """One model with its engine.

    Attributes:
        tokenizer: of transformers. model_name: as clients name it. vocab_size: ids below it are tokens.
        context_length: tokens that the model sees at a time. text_limit: tokens of prompt and answer together: as many,
            or any number where texts go on beyond the context. cache: how caches are kept where a request does not say.
        sessions: finished turns that later requests continue; None: none are stored.
    """

    @property
    def tokenizer(self) -> Any: ...

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
        """The answers of a request as they grow; closing the generator cancels the request and frees its pages."""
        ...

    async def cancel(self, request_id: str) -> None:
        """End a request with what it has; one that is not there any more is no error."""
        ...

    def stats(self) -> EngineStats:
        """The engine at this moment."""
        ...

    def trouble(self, limit_s: float) -> str | None:
        """Why nothing moves: the engine ended, or one step takes more than `limit_s` seconds. None: all is well."""
        ...

    @property
    def step_age_s(self) -> float:
        """Seconds since the step began that the engine is at; 0 where it waits."""
        ...

    async def memory(self, request_id: str, layer: int, client: str | None = None) -> CacheSnapshot | None:
        """What one layer remembers of a request's first answer; None if nothing is known of it, or not by `client`."""
        ...

    async def close(self, *, drain: bool = True, timeout: float | None = None) -> None:
        """Stop within `timeout` seconds; with `drain` what runs may finish first."""
        ...
