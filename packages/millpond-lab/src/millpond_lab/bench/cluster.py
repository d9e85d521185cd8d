"""`bench cluster`: the same load for each layout of workers in turns, differences within each round."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any, Self

from millpond.errors import OptionError, unknown
from millpond_lab.bench.common.machine import describe_machine
from millpond_lab.bench.common.report import markdown_table
from millpond_lab.bench.serve.client import LoadClient
from millpond_lab.bench.serve.requests import Span, synthetic
from millpond_lab.bench.serve.run import LoadPlan
from millpond_lab.bench.serve.run import run as send

#: Layouts by name, with the options of `millpond serve`.
LAYOUTS: dict[str, tuple[str, ...]] = {
    "single": (),
    "one replica": ("--replicas", "1"),
    "two replicas": ("--replicas", "2"),
    "split": ("--prefill", "1", "--decode", "1"),
}
#: Seconds in which a server starts and ends.
_START_S, _END_S = 300.0, 60.0


class BenchServer:
    """One server, which has started when it is made.

    Args:
        options: of `millpond serve`, without the address.

    Attributes:
        url: of the server.

    Raises:
        OptionError: it does not start; its last words are in the message.
    """

    def __init__(self, options: Sequence[str]) -> None:
        command = [sys.executable, "-m", "millpond", "serve", "--port", "0", *options]
        self._process = subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=os.environ | {"MILLPOND_API_KEYS": "", "MILLPOND_OPERATOR_KEY": ""},
        )
        self._reader = threading.Thread(target=self._drain, daemon=True)
        late = threading.Timer(_START_S, self._process.kill)
        late.start()
        try:
            self.url = self._address()
        except BaseException:
            self.close()
            raise
        finally:
            late.cancel()
        self._reader.start()

    def close(self) -> None:
        """End the server, and the workers that it started."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(_END_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._reader.is_alive():
            self._reader.join(_END_S)
        if self._process.stderr is not None and not self._reader.is_alive():
            self._process.stderr.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _address(self) -> str:
        assert self._process.stderr is not None
        last = ""
        for line in self._process.stderr:
            if found := re.search(r"http://127\.0\.0\.1:\d+", line):
                return found[0]
            last = line.strip() or last
        raise OptionError(f"millpond serve did not start: {last[:300]}")

    def _drain(self) -> None:
        """Read what the server writes, so that it never waits for a reader."""
        assert self._process.stderr is not None
        for _ in self._process.stderr:
            pass


#: The layout that others are compared with.
ANCHOR = "single"
#: Percentile of the times that are compared.
_MEDIAN = "p50"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterBench:
    """Settings of the benchmark.

    Attributes:
        layouts: names of `LAYOUTS`, the anchor among them. options: of `millpond serve`, for all of them.
        rounds: in each of which all layouts have the load once, in another order. requests: of one load.
        users: requests in flight. prompt, output: tokens, "64" or "16-128". vocab_size: prompts are below it.

    Raises:
        OptionError: an unknown layout, one given twice, no anchor, or a number below 1.
    """

    layouts: tuple[str, ...] = tuple(LAYOUTS)
    options: tuple[str, ...] = ()
    rounds: int = 5
    requests: int = 32
    users: int = 8
    prompt: str = "256"
    output: str = "64"
    vocab_size: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        for name in self.layouts:
            if name not in LAYOUTS:
                raise unknown("layout", name, LAYOUTS)
        if ANCHOR not in self.layouts or len(set(self.layouts)) < len(self.layouts):
            raise OptionError(f"layouts {', '.join(self.layouts)}: {ANCHOR!r} must be one of them, and each come once")
        for name in ("rounds", "requests", "users"):
            if getattr(self, name) < 1:
                raise OptionError(f"{name}={getattr(self, name)}: must be at least 1")


def run(bench: ClusterBench, progress: Callable[[str], None] = lambda words: None) -> dict[str, Any]:
    """Start a server for each layout, load one at a time, and compare them.

    Raises:
        OptionError: a server does not start. DataError: one cannot be reached.
    """
    machine, order = describe_machine(), random.Random(bench.seed)
    runs: list[dict[str, Any]] = []
    with ExitStack() as stack:
        servers = {}
        for name in bench.layouts:
            progress(f"starting {name}")
            servers[name] = stack.enter_context(BenchServer([*LAYOUTS[name], *bench.options]))
        for turn in range(-1, bench.rounds):  # the first one warms up and does not count
            for name in order.sample(bench.layouts, len(bench.layouts)):
                progress(f"round {turn + 1} of {bench.rounds}: {name}")
                found = asyncio.run(_load(bench, servers[name].url, turn))
                if turn >= 0:
                    runs.append({"round": turn, "layout": name, **found})
    return {
        "benchmark": "cluster",
        "machine": machine.as_dict(),
        "hardware": machine.hardware,
        "software": machine.software,
        "settings": asdict(bench),
        "runs": runs,
        "results": [row_of(name, runs) for name in bench.layouts],
    }


async def _load(bench: ClusterBench, url: str, turn: int) -> dict[str, Any]:
    """The load of a round: other prompts in each, the same for all layouts."""
    seed = bench.seed + 1 + turn
    asks = synthetic(bench.requests, Span.parse(bench.prompt), Span.parse(bench.output), 0, seed)
    before = await _moves(url)
    data = await send(LoadPlan(url=url, users=bench.users, vocab_size=bench.vocab_size, seed=seed), asks)
    after, summary = await _moves(url), data["summary"]
    return {
        "tokens_per_s": summary["output_tokens_per_s"],
        "failed": summary["failed"],
        "ttft_s": _median(summary["ttft_s"]),
        "tpot_s": _median(summary["tpot_s"]),
        "e2e_s": _median(summary["e2e_s"]),
        **{name: after[name] - before[name] for name in after},
    }


async def _moves(url: str) -> dict[str, float]:
    """Counters of moves; none of one engine."""
    async with LoadClient(url) as client:
        workers = "/cluster" in json.loads(await client.get("/openapi.json"))["paths"]
        found = json.loads(await client.get("/cluster")) if workers else {}
    return {name: found[name] for name in ("moved", "moved_bytes", "move_s", "replayed") if name in found}


def row_of(name: str, runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the rounds of a layout, and of its ratios and differences to the anchor in the same round."""
    here = {one["round"]: one for one in runs if one["layout"] == name}
    anchor = {one["round"]: one for one in runs if one["layout"] == ANCHOR}
    rounds = sorted(here)

    def times(field: str) -> list[float]:
        return [here[turn][field] - anchor[turn][field] for turn in rounds]

    moved = sum(one.get("moved", 0) for one in here.values())
    return {
        "layout": name,
        "failed": sum(one["failed"] for one in here.values()),
        **{
            field: statistics.median(one[field] for one in here.values())
            for field in ("tokens_per_s", "ttft_s", "tpot_s", "e2e_s")
        },
        "rate": _spread([here[turn]["tokens_per_s"] / anchor[turn]["tokens_per_s"] for turn in rounds]),
        "ttft_more_s": _spread(times("ttft_s")),
        "e2e_more_s": _spread(times("e2e_s")),
        "moved": moved,
        "move_s": sum(one.get("move_s", 0.0) for one in here.values()) / moved if moved else None,
        "moved_bytes": sum(one.get("moved_bytes", 0) for one in here.values()) / moved if moved else None,
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def _median(times: dict[str, float] | None) -> float:
    return float("nan") if times is None else times[_MEDIAN]


def markdown(data: dict[str, Any]) -> str:
    """One line for each layout; differences are to one engine without Ray, within the same round."""
    settings = data["settings"]
    head = (
        f"# One engine, replicas and split workers\n\n{data['hardware']}. {data['software']}. `{data['command']}`\n\n"
        f"{settings['requests']} requests of {settings['prompt']} tokens and {settings['output']} new ones, "
        f"{settings['users']} in flight, through HTTP, streamed; {settings['rounds']} rounds, in each of which every "
        "layout has the same load once, in another order, while the other servers wait. Medians of rounds; in brackets "
        "the smallest and the largest of the rounds' differences.\n\n"
    )
    names = (
        "layout",
        "failed",
        "tokens/s",
        "of single",
        "first token, ms",
        "more than single, ms",
        "answer, ms",
        "more than single, ms",
        "moved, ms each",
        "KB each",
    )
    return head + markdown_table(names, [_line(row) for row in data["results"]])


def _line(row: dict[str, Any]) -> tuple[str, ...]:
    rate = row["rate"]
    return (
        row["layout"],
        str(row["failed"]),
        f"{row['tokens_per_s']:,.1f}",
        f"{rate['median']:.3f} [{rate['low']:.3f}, {rate['high']:.3f}]",
        f"{1000 * row['ttft_s']:,.1f}",
        _more(row["ttft_more_s"]),
        f"{1000 * row['e2e_s']:,.1f}",
        _more(row["e2e_more_s"]),
        "" if row["move_s"] is None else f"{1000 * row['move_s']:,.1f}",
        "" if row["moved_bytes"] is None else f"{row['moved_bytes'] / 1000:,.0f}",
    )


def _more(found: dict[str, float]) -> str:
    return f"{1000 * found['median']:+,.1f} [{1000 * found['low']:+,.1f}, {1000 * found['high']:+,.1f}]"
