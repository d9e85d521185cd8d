"""An engine that knows no model: it counts upwards from the last token of the prompt, when the test lets it."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx

from millpond.engine.outputs import (
    CacheSnapshot,
    Completion,
    EngineStats,
    FinishReason,
    Forgotten,
    KVStats,
    RequestOutput,
    Times,
    TokenLogprob,
)
from millpond.engine.request import CacheOptions, Request
from millpond.errors import MillpondError, OptionError
from millpond.methods import METHODS
from millpond.server.app import create_app
from millpond.server.settings import ServerSettings
from tests.helpers.evals.small import WORDS, tiny_tokenizer

VOCAB = len(WORDS)
#: Bytes of one token in the fake's cache; it holds half of what it saw.
TOKEN_BYTES = 100


class FakeLLM:
    """A `ServedLLM`.

    Attributes:
        open: set: tokens come as fast as they can; clear: all but the first `free` wait.
        asked: requests in the order of arrival.
        reads: tokens of a prompt that are read at a time, where that is told; `reading`: clear: no more are.
        ended: request id -> how its stream ended: "finished", "cancelled" or "closed". fails: raised after a token.
    """

    def __init__(self, context_length: int = 64, tokenizer: Any = None) -> None:
        self.tokenizer = tokenizer or tiny_tokenizer()
        self.model_name, self.images = "fake/counter", None
        self.context_length = self.text_limit = context_length
        self.vocab_size = VOCAB
        self.cache = CacheOptions(method="h2o", budget="20%")
        self.open = asyncio.Event()
        self.open.set()
        self.free = 0
        self.asked: list[Request] = []
        self.ended: dict[str, str] = {}
        self.running: set[str] = set()
        self.fails: MillpondError | None = None
        self.reason: FinishReason | None = None
        self.closed = False
        self.hangs: str | None = None
        self.reads = 4
        self.reading = asyncio.Event()
        self.reading.set()
        self._cancelled: set[str] = set()

    sessions: Any = None

    async def stream(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        if request.cache.method is not None:
            METHODS.get(request.cache.method)
        if self.closed:
            raise OptionError("the engine is closed")
        self.asked.append(request)
        self.running.add(request.request_id)
        arrived = time.monotonic()
        end = "closed"
        try:
            for read in range(self.reads, len(request.prompt), self.reads) if request.tell_read else ():
                yield self.output(request, 0, None, arrived, read)
                await self.reading.wait()
            for length in range(1, (request.params.max_tokens or 8) + 1):
                reason = await self._wait(request, arrived, length)
                if self.fails is not None and length > 1:
                    raise self.fails
                last = length == (request.params.max_tokens or 8)
                reason = reason or ((self.reason or "length") if last else None)
                made = length - 1 if reason in ("cancelled", "deadline") else length
                yield self.output(request, made, reason, arrived)
                if reason is not None:
                    end = "cancelled" if reason == "cancelled" else "finished"
                    return
        finally:
            self.running.discard(request.request_id)
            self.ended[request.request_id] = end

    async def _wait(self, request: Request, arrived: float, length: int) -> FinishReason | None:
        await asyncio.sleep(0)
        while length > self.free and not self.open.is_set():
            if request.request_id in self._cancelled:
                return "cancelled"
            if request.deadline is not None and time.monotonic() - arrived > request.deadline:
                return "deadline"
            await asyncio.sleep(0.002)
        return "cancelled" if request.request_id in self._cancelled else None

    def answer(self, prompt: Sequence[int], index: int, length: int) -> tuple[int, ...]:
        return tuple(2 + (prompt[-1] - 1 + 10 * index + i) % (VOCAB - 2) for i in range(length))

    def output(
        self, request: Request, length: int, reason: FinishReason | None, arrived: float, read: int | None = None
    ) -> RequestOutput:
        assert not isinstance(request.prompt, str)
        prompt, params = request.prompt, request.params
        now = time.monotonic()
        completions = []
        for index in range(params.n):
            ids = self.answer(prompt, index, length)
            told = None if params.logprobs is None else tuple(self._logprob(i, params.logprobs) for i in ids)
            seen = len(prompt) + length
            kv = KVStats(seen, seen / 2, seen * TOKEN_BYTES // 2, seen * TOKEN_BYTES, seen // 2, shared_tokens=3)
            lost = self.forgotten(request) if reason else ()
            completions.append(Completion(index, self.text(ids), ids, told, reason, None, kv, lost))
        before = None
        if params.prompt_logprobs is not None:
            before = (None, *(self._logprob(i, params.prompt_logprobs) for i in prompt[1:]))
        times = Times(arrived, arrived, now if length else None, now if reason else None)
        return RequestOutput(
            request.request_id,
            None,
            prompt,
            tuple(completions),
            times,
            before,
            finished=reason is not None,
            read=len(prompt) if read is None else read,
            cached=3 if read is None else 0,
        )

    def forgotten(self, request: Request) -> tuple[Forgotten, ...]:
        """A quarter of each span, and half of it in most heads; 60 % of its entries are held."""
        return tuple(Forgotten(begin, end, 0.25, 0.5, 0.6) for begin, end in request.marks.report)

    def text(self, ids: Sequence[int]) -> str:
        return "".join(f" {WORDS[i]}" for i in ids)

    def _logprob(self, token: int, top: int) -> TokenLogprob:
        """The token itself is the likeliest where its id is even."""
        others = [(token + 1 + i) % VOCAB for i in range(top)]
        likeliest = ([token, *others] if token % 2 == 0 else others)[:top]
        shown = tuple((i, -0.5 - rank, f" {WORDS[i]}") for rank, i in enumerate(likeliest))
        spelled = tuple(text.encode() for _, _, text in shown)
        logprob, text = -0.5 if token % 2 == 0 else -9.0, f" {WORDS[token]}"
        return TokenLogprob(token, logprob, text, shown, text.encode(), spelled)

    async def cancel(self, request_id: str) -> None:
        self._cancelled.add(request_id)

    def stats(self) -> EngineStats:
        running = len(self.running) if self.open.is_set() else 0
        done = len(self.ended)
        return EngineStats(running, len(self.running) - running, 0, 500, 1000, 4000, 1500, 70, 30, 20, 9, 1, done)

    @property
    def step_age_s(self) -> float:
        return 0.0 if self.hangs is None else 12.5

    def trouble(self, limit_s: float) -> str | None:
        return self.hangs

    async def memory(self, request_id: str, layer: int, client: str | None = None) -> CacheSnapshot | None:
        if request_id not in self.running and request_id not in {r.request_id for r in self.asked if r.watch}:
            return None
        if client not in (None, {r.request_id: r.client for r in self.asked}.get(request_id, client)):
            return None
        if layer >= 2:
            raise OptionError(f"layer {layer}: the model has layers 0 to 1")
        kv = KVStats(4, 2.0, 200, 400, 2)
        return CacheSnapshot(layer, 2, 2, (1, 2, 3, 4), (1.0, 0.0, 0.5, 1.0), (2.0, None, 1 / 3, math.pi), kv)

    async def close(self, *, drain: bool = True, timeout: float | None = None) -> None:
        self.closed = True


@asynccontextmanager
async def client_of(llm: FakeLLM, **settings: Any) -> Any:
    """A client that speaks to the app without a network; bodies arrive whole."""
    app = create_app(llm, ServerSettings(**settings))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=20) as client:
        yield client
