"""Seeded chunks and prompts that hold them in random orders."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from millpond.engine.chunks.prompt import Chunk, Prompt

Ids = tuple[int, ...]


def random_chunks(count: int, tokens: int, vocab: int, seed: int) -> list[Ids]:
    """`count` chunks of `tokens` ids each, from 1 to vocab - 1."""
    rng = np.random.default_rng(seed)
    return [tuple(int(i) for i in rng.integers(1, vocab, tokens)) for _ in range(count)]


def shuffled(chunks: Sequence[Ids], suffix: Ids, seed: int) -> Prompt:
    """A prompt of all chunks in a random order, and a suffix."""
    order = np.random.default_rng(seed).permutation(len(chunks))
    return Prompt([*(Chunk(chunks[place]) for place in order), suffix])


def queries(chunks: Sequence[Ids], count: int, per_query: int, suffix: Ids, seed: int) -> Iterator[Prompt]:
    """`count` prompts of `per_query` different chunks each, all chunks being as likely, in random order."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        picked = rng.choice(len(chunks), per_query, replace=False)
        yield Prompt([*(Chunk(chunks[place]) for place in picked), suffix])
