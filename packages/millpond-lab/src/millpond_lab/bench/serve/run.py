"""A run of `millpond bench serve`: requests, their schedule, and the results."""

from __future__ import annotations

import asyncio
import random
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from millpond.errors import OptionError
from millpond_lab.bench.serve.client import Gauges, LoadClient, RequestOutcome
from millpond_lab.bench.serve.requests import LoadRequest

#: Sends an ask that was planned for a second of the run.
Send = Callable[[LoadRequest, float], Awaitable[RequestOutcome]]


def poisson(n: int, per_s: float, seed: int) -> list[float]:
    """Times of `n` independent arrivals, `per_s` of them a second on average, from 0 s."""
    drawn, at, times = random.Random(seed), 0.0, []
    for _ in range(n):
        times.append(at)
        at += drawn.expovariate(per_s)
    return times


async def open_loop(
    asks: Sequence[LoadRequest], times: Sequence[float], send: Send, now: Callable[[], float]
) -> list[RequestOutcome]:
    """Send each request at its time, however many are unanswered: an open loop of independent users."""

    async def one(ask: LoadRequest, at: float) -> RequestOutcome:
        await asyncio.sleep(at - now())
        return await send(ask, at)

    return list(await asyncio.gather(*(one(ask, at) for ask, at in zip(asks, times, strict=True))))


async def closed_loop(
    asks: Sequence[LoadRequest], users: int, send: Send, now: Callable[[], float]
) -> list[RequestOutcome]:
    """Users with one unanswered request each; a session is one user's, one request after another."""
    sessions: dict[str | int, deque[int]] = {}
    for i, ask in enumerate(asks):
        sessions.setdefault(i if ask.session is None else ask.session, deque()).append(i)
    waiting, outcomes = deque(sessions.values()), dict[int, RequestOutcome]()

    async def user() -> None:
        while waiting:
            for i in waiting.popleft():
                outcomes[i] = await send(asks[i], now())

    await asyncio.gather(*(user() for _ in range(users)))
    return [outcomes[i] for i in range(len(asks))]


#: Latencies that a service level may name.
LEVELS = ("ttft", "tpot", "e2e")
PERCENTILES = (50, 90, 99)


def parse_levels(text: str | None) -> dict[str, float]:
    """Seconds by name, from "ttft=2,tpot=0.1".

    Raises:
        OptionError: another name, one given twice, or no time above 0.

    Example:
        >>> parse_levels("ttft=2,tpot=0.1")
        {'ttft': 2.0, 'tpot': 0.1}
    """
    levels: dict[str, float] = {}
    for part in text.split(",") if text else ():
        name, _, value = part.strip().partition("=")
        try:
            seconds = float(value)
        except ValueError:
            seconds = 0.0
        if name not in LEVELS or name in levels or not 0 < seconds < float("inf"):
            raise OptionError(f"service level {part.strip()!r} must read ttft=2, tpot=0.1 or e2e=30, in seconds, once")
        levels[name] = seconds
    return levels


def summarise(outcomes: Sequence[RequestOutcome], levels: Mapping[str, float]) -> dict[str, Any]:
    """Counts, rates and times, over the seconds from the first sending to the last end.

    A failed request is in no time and no token count, and misses every service level. An answer of one token has no
    time per token and misses none. Goodput is the rate of requests that meet all levels at once.
    """
    answered = [outcome for outcome in outcomes if outcome.failure is None]
    seconds = max(o.ended_s for o in outcomes) - min(o.sent_s for o in outcomes) if outcomes else 0.0
    met = {name: [_meets(outcome, name, limit) for outcome in outcomes] for name, limit in levels.items()}
    joint = [outcome.failure is None and all(of[i] for of in met.values()) for i, outcome in enumerate(outcomes)]
    read, written = sum(o.prompt_tokens for o in answered), sum(o.output_tokens for o in answered)

    def rate(n: int) -> float:
        return n / seconds if seconds else 0.0

    return {
        "sent": len(outcomes),
        "answered": len(answered),
        "failed": len(outcomes) - len(answered),
        "failures": dict(Counter(o.failure for o in outcomes if o.failure is not None)),
        "seconds": seconds,
        "prompt_tokens": read,
        "output_tokens": written,
        "requests_per_s": rate(len(answered)),
        "output_tokens_per_s": rate(written),
        "total_tokens_per_s": rate(read + written),
        "ttft_s": spread([o.ttft_s for o in answered]),
        "tpot_s": spread([o.tpot_s for o in answered]),
        "e2e_s": spread([o.e2e_s for o in answered]),
        "late_s": spread([o.sent_s - o.planned_s for o in outcomes]),
        "levels_s": dict(levels),
        "attained": {name: _share(of) for name, of in met.items()},
        "attained_jointly": _share(joint),
        "goodput_per_s": rate(sum(joint)),
    }


def spread(values: Sequence[float | None]) -> dict[str, float] | None:
    """Mean, percentiles and largest of the known values; None without any."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    percentiles = np.percentile(known, PERCENTILES)
    named = {f"p{p}": float(value) for p, value in zip(PERCENTILES, percentiles, strict=True)}
    return {"mean": float(np.mean(known)), **named, "max": max(known)}


def _meets(outcome: RequestOutcome, name: str, limit: float) -> bool:
    time = {"ttft": outcome.ttft_s, "tpot": outcome.tpot_s, "e2e": outcome.e2e_s}[name]
    return outcome.failure is None and (time is None or time <= limit)


def _share(met: Sequence[bool]) -> float:
    return sum(met) / len(met) if met else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """How a list of asks is sent.

    Attributes:
        url, model, api_key, timeout_s: of the server; without a model, the first that it names.
        rate: open loop, Poisson arrivals per second. users: closed loop. Neither: open loop at the trace's own times,
            `speed` times as fast.
        chat: as one message of a chat, not as a completion.
        vocab_size: made-up tokens are below it. ignore_eos: ask for answers of the trace's length.
        extra: more fields of each body. levels: service levels in seconds.
    """

    url: str
    model: str | None = None
    api_key: str | None = None
    timeout_s: float = 600.0
    rate: float | None = None
    users: int | None = None
    speed: float = 1.0
    chat: bool = False
    vocab_size: int = 256
    ignore_eos: bool = True
    extra: Mapping[str, Any] = field(default_factory=dict)
    levels: Mapping[str, float] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        if self.rate is not None and self.users is not None:
            raise OptionError("a rate is an open loop, users are a closed one; give one of them")

    def body(self, ask: LoadRequest, model: str) -> dict[str, Any]:
        """What is posted for an ask."""
        prompt = ask.prompt if isinstance(ask.prompt, str) else ask.prompt.tokens(self.vocab_size, self.seed)
        asked = {"messages": [{"role": "user", "content": prompt}]} if self.chat else {"prompt": prompt}
        ends = {"ignore_eos": True} if self.ignore_eos else {}
        return {
            "model": model,
            **asked,
            "max_tokens": ask.output_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **ends,
            **self.extra,
        }


async def run(
    plan: LoadPlan, asks: Sequence[LoadRequest], progress: Callable[[int, int], None] | None = None
) -> dict[str, Any]:
    """Send all asks; returns the summary, the server's own numbers and each request's times.

    Raises:
        OptionError: made-up tokens in a chat. DataError: the server cannot be reached at all, or names no model.
    """
    if plan.chat and any(not isinstance(ask.prompt, str) for ask in asks):
        raise OptionError("a chat takes text, and this load has token ids; leave --chat out, or take a load of texts")
    async with LoadClient(plan.url, plan.api_key, plan.timeout_s) as client:
        model = plan.model or await client.model()
        path, done = "/v1/chat/completions" if plan.chat else "/v1/completions", 0

        async def send(ask: LoadRequest, planned_s: float) -> RequestOutcome:
            nonlocal done
            outcome = await client.send(path, plan.body(ask, model), planned_s)
            done += 1
            if progress is not None:
                progress(done, len(asks))
            return outcome

        async with Gauges(client) as gauges:
            client.start_clock()
            if plan.users is not None:
                outcomes = await closed_loop(asks, plan.users, send, client.now)
            else:
                outcomes = await open_loop(asks, _times(plan, asks), send, client.now)
    return {
        "model": model,
        "load": _load(plan),
        "summary": summarise(outcomes, plan.levels),
        "server": {"peaks": gauges.peaks, "gained": gauges.gained},
        "requests": [asdict(o) for o in outcomes],
    }


def _times(plan: LoadPlan, asks: Sequence[LoadRequest]) -> list[float]:
    if plan.rate is not None:
        return poisson(len(asks), plan.rate, plan.seed)
    return [ask.at_s / plan.speed for ask in asks]


def _load(plan: LoadPlan) -> str:
    """How the asks were sent, in words."""
    if plan.users is not None:
        return f"closed loop, {plan.users} users"
    if plan.rate is not None:
        return f"open loop, Poisson arrivals, {plan.rate:g} per second"
    return "open loop, the trace's own times" + ("" if plan.speed == 1 else f", {plan.speed:g} times as fast")
