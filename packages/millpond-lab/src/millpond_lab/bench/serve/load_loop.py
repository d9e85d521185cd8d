"""When each request is sent: by the clock whatever happens (open loop), or as answers come (closed loop)."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from millpond_lab.bench.serve.client import RequestOutcome
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
