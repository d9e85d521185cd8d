"""A profile of a model on this machine: an engine answers users at once, its steps and moves are timed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from millpond.cluster.plan.cache_size import CacheSize
from millpond.cluster.plan.fit import fit
from millpond.cluster.plan.measure_moves import measure_moves
from millpond.cluster.plan.move_times import FREE_MOVES
from millpond.cluster.plan.profile import StepLoad
from millpond.cluster.plan.profile_file import Profile
from millpond.engine.async_llm import AsyncLLM
from millpond.engine.engine import Engine
from millpond.engine.request import Request
from millpond.engine.sampling.params import SamplingParams
from millpond.engine.scheduler import Step
from millpond.errors import OptionError, PoolFullError
from millpond.runner.cache_layout import CacheLayout
from millpond.runner.packed_model import LayerShape

#: Users that have a request under way at a time, in turn, and requests of each in a round; prompts take all lengths.
USERS, EACH = (1, 2, 4, 8, 16), 2


@dataclass(frozen=True, slots=True)
class Measured:
    """A profile, the steps behind it, and the median relative error of the fit.

    Attributes:
        refused: why requests of the engine cannot move, so that the profile has no cost of moves; None: it has.
    """

    profile: Profile
    steps: tuple[tuple[StepLoad, float], ...]
    error: float
    refused: str | None = None


async def measure(
    llm: AsyncLLM, name: str, *, prompts: Sequence[int] = (32, 128, 256, 512), new: int = 24, rounds: int = 2,
    seed: int = 0, note: str = "", report: Callable[[str], None] | None = None,
) -> Measured:  # fmt: skip
    """Time the steps of an engine that streams its answers and does nothing else, and fit them.

    Some users have one request after another, so that prompts come while answers of other lengths are under way, as
    they do where requests arrive at any time; the first round only warms up. Then the shortest and the longest prompt
    move out of the engine and into it again.

    Args:
        llm: with the method, budget and codec of the profile, and without a prefix cache.
        prompts: tokens of the prompts, in turn. new: tokens of an answer, at most; half as many at least. note: on the
            machine, for the profile.

    Raises:
        OptionError: a prompt and its answer exceed the model's context, or the engine is busy. DataError: see `fit`.
    """
    longest = max(prompts) + new
    if longest > llm.context_length:
        raise OptionError(
            f"prompts of {max(prompts):,} tokens with {new} new ones exceed the model's {llm.context_length:,}; "
            "give shorter ones"
        )
    if await llm.call(lambda engine: engine.busy):
        raise OptionError("the engine has requests; measure one that has none")
    cache, head_dim = await llm.call(cache_of)
    steps: list[tuple[StepLoad, float]] = []
    watch = _Watch(cache, steps)
    await llm.call(lambda engine: setattr(engine, "watch", watch))
    try:
        for turn in range(rounds + 1):
            if turn == 1:
                steps.clear()
            for users in USERS:
                if report is not None:
                    report("warming up" if turn == 0 else f"round {turn} of {rounds}: {users} at a time")
                lengths = [prompts[n % len(prompts)] for n in range(max(EACH * users, len(prompts)))]
                await _load(llm, watch, f"{turn}-{users}", users, lengths, new, seed)
    finally:
        await llm.call(lambda engine: setattr(engine, "watch", None))
    times, error = fit(steps)
    moves, refused = FREE_MOVES, None
    if report is not None:
        report("moves")
    try:
        moves = await llm.call(lambda engine: measure_moves(engine, cache, (min(prompts), max(prompts)), seed))
    except (OptionError, PoolFullError) as error_:
        refused = str(error_)
    step_tokens = await llm.call(lambda engine: engine.config.max_step_tokens)
    profile = Profile(name, {1: times}, cache, head_dim, True, note, step_tokens, moves)
    return Measured(profile, tuple(steps), error, refused)


async def _load(
    llm: AsyncLLM, watch: _Watch, name: str, users: int, lengths: Sequence[int], new: int, seed: int
) -> None:  # fmt: skip
    """Let some users ask for one answer after another, as long as there are prompts of these lengths."""
    draw = np.random.default_rng(seed)
    asks = iter([(n, draw.integers(0, llm.vocab_size, length), new - n % (new // 2 + 1))
                 for n, length in enumerate(lengths)])  # fmt: skip

    async def user() -> None:
        for n, ids, tokens in asks:
            key = f"{name}-{n}"
            params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
            watch.prompts[key] = len(ids)
            async for _ in llm.stream(Request(request_id=key, prompt=tuple(ids.tolist()), params=params)):
                pass

    await asyncio.gather(*(user() for _ in range(users)))


class _Watch:
    """What each step of an engine did, from the jobs of its scheduler."""

    def __init__(self, cache: CacheSize, steps: list[tuple[StepLoad, float]]) -> None:
        self.prompts: dict[str, int] = {}
        self._cache = cache
        self._steps = steps
        self._done: dict[str, int] = {}

    def __call__(self, step: Step, seconds: float) -> None:
        tokens = squares = ended = entries = 0
        for job, n in step.chunks:  # which have been read by now
            tokens += n
            squares += job.read**2 - (job.read - n) ** 2
            ended += job.read == job.prompt
        for job in step.decodes:
            done = self._done[job.key] = self._done.get(job.key, 0) + 1
            entries += self._cache.kept(self.prompts[job.key], done)
        self._steps.append((StepLoad(tokens, squares, ended, len(step.decodes), entries), seconds))


def cache_of(engine: Engine) -> tuple[CacheSize, int]:
    """What a request of an engine holds with its own method, budget and codec, and the numbers of a key.

    Raises:
        OptionError: a budget in bytes.
    """
    layers, recipe = engine.layers, engine.recipe
    entry_bytes = float(sum(recipe.entry_bytes(layer) for layer in layers))
    stored = sum(_stored_bytes(recipe, layer) for layer in layers)
    policy = recipe.policy
    grows = policy.keeps_all or (policy.grows_when_decoded and not policy.makes_room)
    budget = None if policy.keeps_all else recipe.budget
    return CacheSize(entry_bytes, stored, budget, grows), layers[0].key_dim


def _stored_bytes(recipe: CacheLayout, layer: LayerShape) -> float:
    """Bytes of a kept token in one layer; codes as far as they take no more than numbers as they are."""
    own, codec = recipe.entry_bytes(layer), recipe.codec(layer)
    if codec is None:
        return own
    numbers = layer.n_kv_heads * (layer.key_dim + layer.value_dim)
    return min(own, numbers * codec.bits_per_element(layer.key_dim, layer.value_dim) / 8)
