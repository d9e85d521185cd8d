"""Texts of `pond-recall`: facts at random places in filler, independent of questions' wording and of training."""

from __future__ import annotations

from hashlib import blake2b
from typing import Literal

import numpy as np

from millpond.errors import OptionError
from millpond_lab.pond import words as w
from millpond_lab.pond.facts import Facts
from millpond_lab.pond.words import ids

_GROUP = np.array(ids(w.FILLER))

#: uniform: every word equally often. zipf: some words often, others by text. refrain: one sentence over and over.
Filler = Literal["uniform", "zipf", "refrain"]
FILLERS: tuple[Filler, ...] = ("uniform", "zipf", "refrain")


def stream(*name: object) -> np.random.Generator:
    """The random stream of that name: equal names give equal numbers on every machine."""
    digest = blake2b(":".join(map(str, name)).encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(int.from_bytes(digest, "big")))


def filler(rng: np.random.Generator, length: int, kind: Filler) -> np.ndarray:
    """Filler word ids, (length,)."""
    if kind == "uniform":
        return rng.choice(_GROUP, length)
    if kind == "zipf":
        weights = 1 / (1 + np.arange(len(_GROUP))) ** rng.uniform(0.5, 1.1)
        return rng.choice(rng.permutation(_GROUP), length, p=weights / weights.sum())
    return np.resize(rng.choice(_GROUP, int(rng.integers(8, 21))), length)


def hide(
    rng: np.random.Generator, facts: Facts, length: int, kind: Filler = "uniform", depth: float | None = None
) -> np.ndarray:
    """Word ids (length,): the facts at random places in filler, the facts of a thread in their order.

    Args:
        rng: of the places and the filler.
        facts: what the text says.
        length: words of the text, the facts included.
        kind: of the filler.
        depth: where the first fact stands, 0 at the beginning to 1 at the end; None: anywhere.

    Raises:
        OptionError: the facts alone are longer than the text.
    """
    room = length - facts.size
    if room < 0:
        raise OptionError(f"the facts take {facts.size} words; length {length} must be at least that")
    owners = rng.permutation(np.repeat(np.arange(len(facts.threads)), [len(t) for t in facts.threads]))
    places = np.sort(rng.integers(0, room + 1, len(owners)))
    if depth is not None and len(owners):
        places = np.sort(np.r_[round(depth * room), places[1:]])
    told = [iter(thread) for thread in facts.threads]
    text, before = filler(rng, room, kind), 0
    parts: list[np.ndarray] = []
    for owner, place in zip(owners, places, strict=True):
        parts += [text[before:place], np.array(next(told[owner]))]
        before = int(place)
    return np.concatenate([*parts, text[before:]]).astype(np.int64)
