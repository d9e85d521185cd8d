"""A profile of a model on this machine: engines answer requests, their steps and moves are timed."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from millpond.engine.request import Request
from millpond.engine.sampling.params import SamplingParams
from millpond.errors import OptionError, PoolFullError
from millpond_lab.cluster_plan.layout import FREE_MOVES, MoveTimes
from millpond_lab.cluster_plan.profile import StepLoad, fit, fit_moves
from millpond_lab.cluster_plan.profile_file import Profile
from millpond_lab.cluster_plan.record import EngineRecord, RecordedEngines

#: Users who have a request under way at a time while an engine shows how many it answers, and requests of each.
USERS, EACH = 16, 2
#: Of that rate, the arrivals that are timed, and their number for each engine; prompts take all lengths in turn.
SHARES, REQUESTS = (0.4, 0.7, 1.0, 1.3), 32


@dataclass(frozen=True, slots=True)
class Measured:
    """A profile, the steps behind it, and the median relative error of the fit.

    Attributes:
        refused: why requests of the engine cannot move, so that the profile has no cost of moves; None: it has.
        latency_s: of a move between two of the engines, without what it occupies them for; None: there was none.
    """

    profile: Profile
    steps: tuple[tuple[StepLoad, float], ...]
    error: float
    refused: str | None = None
    latency_s: float | None = None


async def measure(
    engines: RecordedEngines,
    name: str,
    *,
    prompts: Sequence[int] = (32, 128, 256, 512),
    new: int = 24,
    rounds: int = 2,
    seed: int = 0,
    workers: int = 1,
    note: str = "",
    report: Callable[[str], None] | None = None,
) -> Measured:
    """Time the steps of engines that stream their answers and do nothing else, and fit them.

    First some users have one request after another, to warm up and to find the rate that the engines can take. Then
    requests arrive independently of each other, at rates around it, so that prompts come while answers of other lengths
    are under way. Moves are those between the engines; if there are none, the shortest and the longest prompt move
    out of an engine and into it again afterwards.

    Args:
        engines: with the method, budget and codec of the profile, and without a prefix cache.
        prompts: tokens of the prompts, in turn. new: tokens of an answer, at most; half as many at least.
        workers: number of the engines. note: on the machine, for the profile.

    Raises:
        OptionError: a prompt and its answer exceed the model's context, or an engine is busy. DataError: see `fit`.
    """
    longest = max(prompts) + new
    if longest > engines.context_length:
        raise OptionError(
            f"prompts of {max(prompts):,} tokens with {new} new ones exceed the model's {engines.context_length:,}; "
            "give shorter ones"
        )
    say = report or (lambda _: None)
    await engines.record()  # a busy engine is refused before it has more to do
    load = _Load(engines, prompts, new, seed)
    try:
        for turn in range(2):
            say("finding the rate" if turn else "warming up")
            rate = await load.by_users(USERS * workers, EACH)
        await engines.record()
        for turn in range(rounds):
            for share in SHARES:
                say(f"round {turn + 1} of {rounds}: {share * rate:.1f} requests a second")
                await load.arriving(share * rate, REQUESTS * workers)
    finally:
        records = await engines.recorded()
    steps = tuple(step for record in records for step in record.steps)
    times, error = fit(steps)
    moves, refused = _moves_of(records), None
    if moves is None:
        say("moves")
        try:
            moves = await engines.time_moves((min(prompts), max(prompts)), seed)
        except (OptionError, PoolFullError) as error_:
            moves, refused = FREE_MOVES, str(error_)
    one = records[0]
    profile = Profile(name, {1: times}, one.cache, one.head_dim, True, note, one.step_tokens, moves)
    return Measured(profile, steps, error, refused, _latency_of(records))


class _Load:
    """Requests for engines, each with a prompt of its own; see `measure`."""

    def __init__(self, engines: RecordedEngines, prompts: Sequence[int], new: int, seed: int) -> None:
        self._engines, self._prompts, self._new = engines, prompts, new
        self._draw, self._sent = np.random.default_rng(seed), 0

    async def by_users(self, users: int, each: int) -> float:
        """Answer some requests of each of these users, one after another; returns requests a second."""

        async def user() -> None:
            for _ in range(each):
                await self._request()

        began = time.perf_counter()
        await asyncio.gather(*(user() for _ in range(users)))
        return users * each / (time.perf_counter() - began)

    async def arriving(self, rate: float, number: int) -> None:
        """Answer requests that arrive independently, at this rate a second."""
        tasks = list[asyncio.Task[None]]()
        try:
            for gap in self._draw.exponential(1 / rate, number):
                tasks.append(asyncio.create_task(self._request()))
                await asyncio.sleep(gap)
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _request(self) -> None:
        number, self._sent = self._sent, self._sent + 1
        ids = self._draw.integers(0, self._engines.vocab_size, self._prompts[number % len(self._prompts)])
        tokens = self._new - number % (self._new // 2 + 1)
        params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
        request = Request(request_id=f"profile-{number}", prompt=tuple(ids.tolist()), params=params)
        async for _ in self._engines.stream(request):
            pass


def _moves_of(records: Sequence[EngineRecord]) -> MoveTimes | None:
    """What the moves between engines took in the mean, by the length of the prompt; None: there were none."""
    found: dict[str, dict[int, list[float]]] = {"out": defaultdict(list), "in": defaultdict(list)}
    for record in records:
        for move in record.moves:
            found[move.direction][move.prompt].append(move.seconds)
    if not all(found.values()):
        return None
    cache = records[0].cache
    out, into = (
        fit_moves([cache.moved(prompt) for prompt in by], [statistics.fmean(took) for took in by.values()])
        for by in found.values()
    )
    return MoveTimes(*out, *into)


def _latency_of(records: Sequence[EngineRecord]) -> float | None:
    """Seconds between the two ends of a move in the median, less half of a step, which it waits for in the mean.

    Engines on several machines have clocks of their own, which may differ by more.
    """
    moves = [move for record in records for move in record.moves]
    left = {move.request: move.began + move.seconds for move in moves if move.direction == "out"}
    ways = [move.began - left[move.request] for move in moves if move.direction == "in" and move.request in left]
    if not ways:
        return None
    taking = [record for record in records if any(move.direction == "in" for move in record.moves)]
    step = statistics.fmean(seconds for record in taking for _, seconds in record.steps)
    return max(statistics.median(ways) - step / 2, 0.0)
