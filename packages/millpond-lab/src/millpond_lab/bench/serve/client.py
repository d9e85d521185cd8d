"""One request to an OpenAI-compatible server, streamed, and the times of its answer."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any

from millpond.cli.chat_backend import parse_event
from millpond.errors import DataError, OptionError

if TYPE_CHECKING:
    import httpx


@dataclass(slots=True)
class RequestOutcome:
    """Outcome of one request; times in seconds from the beginning of the run.

    Attributes:
        planned_s: when it should be sent. sent_s: when it was sent. first_s: its first text. ended_s: its last byte.
        prompt_tokens, output_tokens: as the server counts them; without its count, the pieces of text received.
        failure: kind of failure, in two words, to be counted; None if answered in full. detail: text of the error.
    """

    planned_s: float
    sent_s: float = 0.0
    first_s: float | None = None
    ended_s: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    failure: str | None = None
    detail: str = field(default="")

    @property
    def ttft_s(self) -> float | None:
        """From sending to the first text."""
        return None if self.first_s is None else self.first_s - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Per token after the first; None for an answer of one token."""
        if self.first_s is None or self.output_tokens < 2:
            return None
        return (self.ended_s - self.first_s) / (self.output_tokens - 1)

    @property
    def e2e_s(self) -> float:
        """From sending to the end."""
        return self.ended_s - self.sent_s


class LoadClient:
    """Sends requests to one server over connections of their own.

    Args:
        url: with or without `/v1` at its end. timeout_s: longest silence of the server.

    Raises:
        OptionError: httpx is not installed, or `url` is not an address.
    """

    def __init__(self, url: str, api_key: str | None = None, timeout_s: float = 600.0) -> None:
        try:
            import httpx
        except ImportError:
            raise OptionError("bench serve needs httpx; install it with: pip install httpx") from None
        try:
            known = httpx.URL(url).scheme in ("http", "https") and httpx.URL(url).host
        except httpx.InvalidURL:
            known = ""
        if not known:
            raise OptionError(f"url {url!r} is not of the form http://127.0.0.1:8000")
        self.root = url.rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._http = httpx.AsyncClient(headers=headers, timeout=timeout_s, limits=limits)
        self._began = time.perf_counter()

    async def __aenter__(self) -> LoadClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    def start_clock(self) -> None:
        """Start the clock: this is second 0."""
        self._began = time.perf_counter()

    def now(self) -> float:
        """Seconds of the run."""
        return time.perf_counter() - self._began

    async def get(self, path: str) -> str:
        """The text at a path below the server's root.

        Raises:
            DataError: it cannot be reached, or answers with an error.
        """
        import httpx

        try:
            response = await self._http.get(self.root + path)
        except httpx.HTTPError as error:
            raise DataError(f"{self.root}{path} cannot be reached: {error or type(error).__name__}") from None
        if response.status_code != 200:
            raise DataError(f"{self.root}{path} answers {response.status_code}: {response.text[:200]}")
        return response.text

    async def model(self) -> str:
        """The first model that the server names.

        Raises:
            DataError: it names none.
        """
        answer = await self.get("/v1/models")
        try:
            return str(json.loads(answer)["data"][0]["id"])
        except (ValueError, KeyError, IndexError, TypeError):
            raise DataError(f"{self.root}/v1/models names no model; give one by --model") from None

    async def send(self, path: str, body: dict[str, Any], planned_s: float) -> RequestOutcome:
        """Send one request and read its stream to the end. Never raises for what server or network do."""
        import httpx

        outcome = RequestOutcome(planned_s, sent_s=self.now())
        try:
            async with self._http.stream("POST", self.root + path, json=body) as response:
                if response.status_code != 200:
                    outcome.failure = f"HTTP {response.status_code}"
                    outcome.detail = (await response.aread()).decode(errors="replace")[:300]
                else:
                    await self._read(response, outcome)
        except httpx.TimeoutException as error:
            outcome.failure, outcome.detail = "timeout", type(error).__name__
        except httpx.HTTPError as error:
            outcome.failure, outcome.detail = "connection lost", f"{type(error).__name__}: {error}"
        outcome.ended_s = self.now()
        return outcome

    async def _read(self, response: httpx.Response, outcome: RequestOutcome) -> None:
        finished, pieces = False, 0
        async for event in _events(response):
            if event == "[DONE]":
                break
            try:
                text, ended, usage = parse_event(event)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                outcome.failure, outcome.detail = "bad event", f"{error}: {event[:200]}"
                return
            finished = finished or ended
            pieces += bool(text)
            if outcome.first_s is None and (text or ended):
                outcome.first_s = self.now()
            if usage:
                outcome.prompt_tokens = int(usage.get("prompt_tokens") or 0)
                outcome.output_tokens = int(usage.get("completion_tokens") or 0)
        outcome.output_tokens = outcome.output_tokens or pieces
        if not finished:
            outcome.failure, outcome.detail = "cut off", "the stream ended without a finish_reason"


async def _events(response: httpx.Response) -> AsyncIterator[str]:
    """The data of each server-sent event."""
    async for line in response.aiter_lines():
        if line.startswith("data:"):
            yield line.removeprefix("data:").strip()


#: Names of cache metrics, among them Millpond's, vLLM's, SGLang's and llama.cpp's.
_OF_CACHE = re.compile(r"kv|cache|token_usage|prefix|evict|preempt|swapped", re.IGNORECASE)
_LINE = re.compile(r"([A-Za-z_:][\w:]*)(?:\{.*\})? ([-+.\deE]+)(?: \d+)?$")
_PARTS = ("_bucket", "_sum", "_count", "_created")  # of histograms, and times of creation


class Gauges:
    """Reads /metrics from the beginning to the end of a block; a server without it has none.

    Attributes:
        peaks: the highest value of each gauge. gained: what was added to each counter.
    """

    def __init__(self, client: LoadClient, every_s: float = 0.5) -> None:
        self.peaks: dict[str, float] = {}
        self.gained: dict[str, float] = {}
        self._client = client
        self._every_s = every_s
        self._first: dict[str, float] = {}
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Gauges:
        try:
            self._first = parse(await self._client.get("/metrics"))
        except DataError:
            return self
        self._note(self._first)
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            await self._look()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            await self._look()

    async def _look(self) -> None:
        """Take one reading; a reading that fails under load is left out."""
        try:
            self._note(parse(await self._client.get("/metrics")))
        except DataError:
            return

    def _note(self, values: dict[str, float]) -> None:
        for name, value in values.items():
            if name.endswith("_total"):
                self.gained[name] = value - self._first.get(name, 0.0)
            else:
                self.peaks[name] = max(value, self.peaks.get(name, value))


def parse(text: str) -> dict[str, float]:
    """Values of the cache's gauges and counters by name, added up over labels.

    Example:
        >>> parse("# HELP a_kv_bytes x\\na_kv_bytes{pool=\\"1\\"} 3\\na_kv_bytes{pool=\\"2\\"} 4.5\\nother 1")
        {'a_kv_bytes': 7.5}
    """
    values: dict[str, float] = {}
    for line in text.splitlines():
        found = _LINE.match(line)
        if found and _OF_CACHE.search(found[1]) and not found[1].endswith(_PARTS):
            try:
                values[found[1]] = values.get(found[1], 0.0) + float(found[2])
            except ValueError:
                continue
    return values
