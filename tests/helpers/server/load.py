"""A client that means well: one answer after another, streamed, and how long each of its tokens took."""

from __future__ import annotations

import json
import statistics
import threading
import time
from dataclasses import dataclass, field

import httpx

#: New tokens of each answer.
TOKENS = 48
PROMPTS = tuple(
    f"{name} kettle quiet rain past meadow and old stone on river <ask> {name} <is>"
    for name in ("anna", "berta", "clara")
)


@dataclass
class Answer:
    """What came of one request: its text, and when its events came; error: why it is not whole."""

    prompt: str
    text: str = ""
    tokens: int = 0
    times: list[float] = field(default_factory=list)
    error: str | None = None

    @property
    def per_token(self) -> float:
        """Seconds per token behind the first."""
        return (self.times[-1] - self.times[1]) / (self.tokens - 1)

    @property
    def whole(self) -> float:
        """Seconds per token, the wait for the first included."""
        return (self.times[-1] - self.times[0]) / self.tokens

    @property
    def gaps(self) -> list[float]:
        """Seconds between two events."""
        return [b - a for a, b in zip(self.times[1:-1], self.times[2:], strict=True)]


@dataclass
class Pace:
    """How fast the answers of a while came: seconds per token, and the longest stop between two."""

    answers: int
    median: float
    p95: float
    whole: float
    longest: float

    @classmethod
    def of(cls, answers: list[Answer]) -> Pace:
        per_token = [one.per_token for one in answers]
        gaps = sorted(gap for one in answers for gap in one.gaps)
        return cls(
            len(answers),
            statistics.median(per_token),
            gaps[int(0.95 * len(gaps))],
            sum(one.times[-1] - one.times[0] for one in answers) / sum(one.tokens for one in answers),
            gaps[-1],
        )

    def __str__(self) -> str:
        return (
            f"{self.answers} answers, ms per token: median {1e3 * self.median:.2f}, with the first "
            f"{1e3 * self.whole:.2f}, 95th percentile {1e3 * self.p95:.2f}, longest {1e3 * self.longest:.0f}"
        )


class GoodClient:
    """Streams in a thread of its own until it is stopped.

    Attributes:
        answers: those that ended, the oldest first.
    """

    def __init__(self, url: str) -> None:
        self.answers: list[Answer] = []
        self._client = httpx.Client(base_url=url, timeout=60)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self) -> GoodClient:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join(60)
        self._client.close()

    def _work(self) -> None:
        while not self._stopped.is_set():
            self.answers.append(self.ask(PROMPTS[len(self.answers) % len(PROMPTS)]))

    def ask(self, prompt: str) -> Answer:
        """One answer to its end."""
        found = Answer(prompt, times=[time.perf_counter()])
        body = {
            "prompt": prompt,
            "max_tokens": TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        try:
            with self._client.stream("POST", "/v1/completions", json=body) as answer:
                if answer.status_code != 200:
                    found.error = f"{answer.status_code}: {answer.read()!r}"
                    return found
                last = ""
                for line in answer.iter_lines():
                    if not line:
                        continue
                    last = line.removeprefix("data: ")
                    if last == "[DONE]":
                        break
                    event = json.loads(last)
                    if event.get("usage"):
                        found.tokens = event["usage"]["completion_tokens"]
                    elif event.get("choices"):
                        found.text += event["choices"][0]["text"]
                        found.times.append(time.perf_counter())
                if last != "[DONE]" or found.tokens != TOKENS:
                    found.error = f"it ended after {found.tokens} tokens with {last[:200]!r}"
        except httpx.HTTPError as error:
            found.error = repr(error)
        return found

    def post(self, path: str, body: object) -> httpx.Response:
        """An answer that is not streamed."""
        return self._client.post(path, json=body)

    def get(self, path: str) -> httpx.Response:
        return self._client.get(path)

    def metrics(self) -> dict[str, str]:
        """What the server counts, by name."""
        lines = self.get("/metrics").text.splitlines()
        return dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))

    def wait_for(self, more: int, seconds: float = 60) -> list[Answer]:
        """The next answers, so many."""
        begin = len(self.answers)
        end = time.monotonic() + seconds
        while len(self.answers) < begin + more and time.monotonic() < end:
            time.sleep(0.01)
        return self.answers[begin:]
