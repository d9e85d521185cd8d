"""The time of a whole answer out of its first steps, where caches that grow are read from a disk."""

from __future__ import annotations

from collections.abc import Callable

from millpond.engine.config import EngineConfig
from millpond.engine.offload.kv_size import KVSize, kv_size, planned
from millpond.engine.offload.model_size import ModelSize


def growth(size: Callable[[int], KVSize], steps: int, new: int, sequences: float, weight_bytes: float) -> float:
    """How much longer a step of the whole answer takes in the mean than one of its first steps.

    The bytes that caches have more by then are read as fast as those of the first steps.

    Args:
        size: of the cache of a sequence, by the tokens of its answer. steps: that were timed. new: tokens of an answer.
        sequences: whose caches lie on the disk. weight_bytes: that each step reads.
    """
    first, whole = (sequences * size(tokens).step_bytes for tokens in (steps, new))
    return (weight_bytes + whole) / (weight_bytes + first) if weight_bytes + first else 1.0


def sizes_of(model: ModelSize, config: EngineConfig, prompt: int) -> Callable[[int], KVSize]:
    """Of the caches of an engine, by the tokens of an answer."""

    def size(new: int) -> KVSize:
        return kv_size(model, prompt, new, **planned(config))

    return size
