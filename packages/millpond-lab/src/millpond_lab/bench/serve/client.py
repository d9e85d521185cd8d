"""One request to an OpenAI-compatible server, streamed, and the times of its answer."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from millpond.cli.chat_backend import parse_event
from millpond.errors import DataError, OptionError

if TYPE_CHECKING:
    import httpx


@dataclass(slots=True)
class RequestOutcome:
    """What became of one request; times in seconds from the beginning of the run.

    Attributes:
        planned_s: when it was to be sent. sent_s: when it was. first_s: its first text. ended_s: its last byte.
        prompt_tokens, output_tokens: as the server counts them; without its count, the pieces of text that came.
        failure: what went wrong, in two words for counting; None: answered whole. detail: in its own words.
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
        url: with or without `/v1` at its end. timeout_s: for which nothing comes.

    Raises:
        OptionError: httpx is not installed, or the address is none.
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
        """Now is second 0."""
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
