"""Times of packing a request and taking it in, of an engine on this machine that does nothing else."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np

from millpond.engine.engine import Engine
from millpond.engine.request import Request
from millpond.engine.sampling.params import SamplingParams
from millpond_lab.cluster_plan.cache_size import CacheSize
from millpond_lab.cluster_plan.fit import fit_moves
from millpond_lab.cluster_plan.move_times import MoveTimes

#: Moves of each length that count, after one that warms up.
MOVES = 7


def measure_moves(
    engine: Engine,
    cache: CacheSize,
    prompts: Sequence[int],
    seed: int = 0,
    clock: Callable[[], float] = time.perf_counter,
) -> MoveTimes:
    """Let an engine pack requests right after their prompts and take them in again, and fit the medians.

    Args:
        cache: of a request, whose bytes a simulation counts.
        prompts: tokens of the prompts, two lengths at least to tell bytes from moves.
        seed: of their tokens.
        clock: of the seconds.

    Raises:
        OptionError: requests of this engine cannot move, see `Engine.export_request`. PoolFullError: there is no room.
    """
    draw = np.random.default_rng(seed)
    sizes, packs, takes = list[int](), list[float](), list[float]()
    for length in sorted(set(prompts)):
        times = [
            _move(engine, f"move-{length}-{n}", draw.integers(0, engine.vocab_size, length).tolist(), clock)
            for n in range(MOVES + 1)
        ][1:]
        sizes.append(cache.moved(length))
        packs.append(statistics.median(pack for pack, _ in times))
        takes.append(statistics.median(take for _, take in times))
    return MoveTimes(*fit_moves(sizes, packs), *fit_moves(sizes, takes))


def _move(engine: Engine, name: str, prompt: Sequence[int], clock: Callable[[], float]) -> tuple[float, float]:
    """Seconds of packing a request whose first token was drawn, and of taking it in."""
    params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
    engine.add(Request(request_id=name, prompt=tuple(prompt), params=params))
    try:
        while not any(one.token_ids for output in engine.step() for one in output.completions):
            pass
        began = clock()
        data = engine.export_request(name)
        packed = clock()
        engine.import_request(data)
        return packed - began, clock() - packed
    finally:
        engine.drain()
