"""What a request takes in front of the engine is waited for while answers of other clients are under way."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from millpond.server import client_pacing
from millpond.server.client_pacing import PAID_BACK, ClientPacing, ClientPacingMiddleware, in_thread
from millpond.server.identity import ClientRegistry
from millpond.server.settings import ServerSettings


def burn(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def scope(host: str, path: str = "/v1/completions") -> dict[str, Any]:
    return {"type": "http", "path": path, "headers": [], "client": (host, 1), "method": "POST"}


async def nothing(message: Any = None) -> Any:
    return {"type": "http.request", "body": b"x" * 2**18, "more_body": True}


def middleware(app: Callable[..., Awaitable[None]], answered: set[str]) -> ClientPacingMiddleware:
    return ClientPacingMiddleware(
        app, ClientPacing(lambda: answered), ClientRegistry(ServerSettings()), frozenset({"/health"})
    )


async def count(
    answered: set[str], path: str, for_s: float, work: Callable[[Any], Awaitable[None]]
) -> tuple[int, float]:
    """Requests that four clients had answered, and the CPU seconds that all of it took."""
    done = 0

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await work(receive)

    front = middleware(app, answered)

    async def ask(host: str) -> None:
        nonlocal done
        while time.monotonic() < end:
            await front(scope(host, path), nothing, nothing)
            done += 1
            await asyncio.sleep(0)

    end, began = time.monotonic() + for_s, time.process_time()
    await asyncio.gather(*(ask(f"10.0.0.{number}") for number in range(4)))
    return done, time.process_time() - began


async def busy(receive: Any) -> None:
    burn(0.005)
    await asyncio.sleep(0)


async def busy_elsewhere(receive: Any) -> None:
    with ThreadPoolExecutor(1) as threads:
        await in_thread(threads, burn, 0.005)


async def reads(receive: Any) -> None:
    await receive()


@pytest.mark.parametrize("work", [busy, busy_elsewhere])
def test_others_requests_take_a_bounded_share_while_somebody_is_answered(
    work: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_pacing, "PAID_BACK", 50.0)  # a share that a machine with other work passes, too
    done, _ = asyncio.run(count({"10.0.0.9"}, "/v1/completions", 1.0, work))
    assert 2 <= done <= 1.0 / (0.005 * 50) + 8


def test_bytes_of_bodies_are_paid_for() -> None:
    done, _ = asyncio.run(count({"10.0.0.9"}, "/v1/completions", 1.0, reads))
    assert 2 <= done <= 1.0 / (2**18 * 2e-8 * PAID_BACK) + 8


@pytest.mark.parametrize(("answered", "path"), [(set(), "/v1/completions"), ({"10.0.0.9"}, "/health")])
def test_nobody_waits_where_nobody_else_is_answered_or_for_health(answered: set[str], path: str) -> None:
    done, took = asyncio.run(count(answered, path, 0.5, busy))
    assert done * 0.005 > 0.6 * took


def test_whoever_has_had_least_goes_first() -> None:
    async def run() -> list[str]:
        pacing, order = ClientPacing(lambda: {"good", "other"}), []
        paced = {name: pacing.enter(name) for name in ("greedy", "good")}
        paced["greedy"].charge(0.02)

        async def wait_turn(name: str) -> None:
            await paced[name].wait_turn()
            order.append(name)

        await asyncio.gather(wait_turn("greedy"), wait_turn("good"))
        return order

    assert asyncio.run(run()) == ["good", "greedy"]


def test_who_goes_away_while_waiting_leaves_no_gap() -> None:
    async def run() -> None:
        pacing = ClientPacing(lambda: {"good"})
        first, second = pacing.enter("a"), pacing.enter("b")
        first.charge(0.02)
        gone = asyncio.create_task(first.wait_turn())
        await asyncio.sleep(0)
        waits = asyncio.create_task(second.wait_turn())
        gone.cancel()
        await asyncio.wait_for(waits, 5)

    asyncio.run(run())


def test_errors_and_cancelling_pass_through() -> None:
    async def fails(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(0)
        raise KeyError("x")

    async def waits(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(60)

    async def run() -> None:
        with pytest.raises(KeyError):
            await middleware(fails, set())(scope("a"), nothing, nothing)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(middleware(waits, set())(scope("a"), nothing, nothing), 0.05)

    asyncio.run(run())
