"""A server's own figures at /metrics under load, in the format of Prometheus."""

from __future__ import annotations

import asyncio
import re
from types import TracebackType

from millpond.errors import DataError
from millpond_lab.bench.serve.client import LoadClient

#: Of any server's metrics, those of its cache. Millpond's, vLLM's, SGLang's and llama.cpp's are among them.
_OF_CACHE = re.compile(r"kv|cache|token_usage|prefix|evict|preempt|swapped", re.IGNORECASE)
_LINE = re.compile(r"([A-Za-z_:][\w:]*)(?:\{.*\})? ([-+.\deE]+)(?: \d+)?$")
_PARTS = ("_bucket", "_sum", "_count", "_created")  # of histograms, and times of birth


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
        """One reading; one that fails under load is left out."""
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
