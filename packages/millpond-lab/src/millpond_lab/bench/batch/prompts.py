"""Seeded prompts that part on several levels, such as instructions, documents and questions."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np

from millpond.errors import OptionError


@dataclass(frozen=True, slots=True)
class TreeLevel:
    """How many texts follow each text of the level before, and how many tokens each has."""

    count: int
    tokens: int


def parse_tree(text: str) -> list[TreeLevel]:
    """Levels as COUNTxTOKENS, separated by commas.

    Raises:
        OptionError: not that, or a number below 1.

    Example:
        >>> parse_tree("2x220,6x50")
        [TreeLevel(count=2, tokens=220), TreeLevel(count=6, tokens=50)]
    """
    levels = []
    for part in text.split(","):
        count, _, tokens = part.partition("x")
        if not (count.isdecimal() and tokens.isdecimal() and int(count) > 0 and int(tokens) > 0):
            raise OptionError(f"{part!r} in {text!r} must be COUNTxTOKENS, such as 6x260")
        levels.append(TreeLevel(int(count), int(tokens)))
    return levels


def tree_prompts(levels: list[TreeLevel], vocab: int, seed: int) -> list[tuple[int, ...]]:
    """All prompts of a tree, in random order; ids are 1 to vocab - 1."""
    rng = np.random.default_rng(seed)
    texts: dict[tuple[int, ...], list[int]] = {}

    def text(place: tuple[int, ...]) -> list[int]:
        if place not in texts:
            texts[place] = rng.integers(1, vocab, levels[len(place) - 1].tokens).tolist()
        return texts[place]

    prompts = [
        tuple(token for depth in range(1, len(place) + 1) for token in text(place[:depth]))
        for place in product(*(range(level.count) for level in levels))
    ]
    return [prompts[number] for number in rng.permutation(len(prompts))]
