"""A profile of a model on this machine: an engine runs prompts of several lengths, its steps and moves are timed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from millpond.cluster.plan.cache_size import CacheSize
from millpond.cluster.plan.fit import fit
from millpond.cluster.plan.measure_moves import measure_moves
from millpond.cluster.plan.move_times import FREE_MOVES
from millpond.cluster.plan.profile import StepLoad
from millpond.cluster.plan.profile_file import Profile
from millpond.engine.engine import Engine
from millpond.engine.request import Request
from millpond.engine.sampling.params import SamplingParams
from millpond.engine.scheduler import Step
from millpond.errors import OptionError, PoolFullError
from millpond.runner.cache_layout import CacheLayout
from millpond.runner.packed_model import LayerShape

#: Answers that are under way together, in turn; prompts of each round take all lengths.
BATCHES = (1, 2, 4, 8, 16)


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


def measure(
    engine: Engine, name: str, *, prompts: Sequence[int] = (32, 128, 256, 512), new: int = 24, rounds: int = 2,
    seed: int = 0, note: str = "", report: Callable[[str], None] | None = None,
) -> Measured:  # fmt: skip
    """Time the steps of an engine that does nothing else, and fit them; the first round only warms up.

    Then the shortest and the longest prompt move out of the engine and into it again.

    Args:
        engine: with the method, budget and codec of the profile, and without a prefix cache.
        prompts: tokens of the prompts, in turn. new: tokens of an answer. note: on the machine, for the profile.

    Raises:
        OptionError: a prompt and its answer exceed the model's context, or the engine is busy. DataError: see `fit`.
    """
    longest = max(prompts) + new
    if engine.context_length is not None and longest > engine.context_length:
        raise OptionError(
            f"prompts of {max(prompts):,} tokens with {new} new ones exceed the model's {engine.context_length:,}; "
            "give shorter ones"
        )
    if engine.busy:
        raise OptionError("the engine has requests; measure one that has none")
    cache, head_dim = cache_of(engine)
    draw = np.random.default_rng(seed)
    steps: list[tuple[StepLoad, float]] = []
    watch = _Watch(cache, steps)
    engine.watch = watch
    try:
        for turn in range(rounds + 1):
            if turn == 1:
                steps.clear()
            for batch in BATCHES:
                if report is not None:
                    report("warming up" if turn == 0 else f"round {turn} of {rounds}: {batch} at a time")
                for n in range(max(batch, len(prompts))):
                    ids = draw.integers(0, engine.vocab_size, prompts[n % len(prompts)])
                    key = f"{turn}-{batch}-{n}"
                    params = SamplingParams(max_tokens=new, temperature=0, ignore_eos=True)
                    watch.prompts[key] = len(ids)
                    engine.add(Request(request_id=key, prompt=tuple(ids.tolist()), params=params))
                    if (n + 1) % batch == 0:
                        engine.drain()
                engine.drain()
    finally:
        engine.watch = None
    times, error = fit(steps)
    moves, refused = FREE_MOVES, None
    if report is not None:
        report("moves")
    try:
        moves = measure_moves(engine, cache, (min(prompts), max(prompts)), seed)
    except (OptionError, PoolFullError) as error_:
        refused = str(error_)
    profile = Profile(name, {1: times}, cache, head_dim, True, note, engine.config.max_step_tokens, moves)
    return Measured(profile, tuple(steps), error, refused)


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
