"""Plan of a batch: which beginnings are read once, and in which order prompts follow them (BatchLLM).

Zheng et al., arXiv:2412.03594: common beginnings are found before anything runs, and prompts with the same one run
together. Here a beginning may continue another one, on as many levels as the prompts have.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from millpond.engine.batch.one_level import one_level
from millpond.engine.batch.tree import Ids, RadixTree
from millpond.errors import OptionError

#: Tokens that a common beginning has at least behind the one before it: a job of its own costs about a step.
SHORTEST = 16


class Trunk(NamedTuple):
    """A common beginning of prompts, read once.

    Attributes:
        prompt: one of the prompts that begin with it. length: its tokens.
        parent: the trunk that it continues, -1 for none.
    """

    prompt: int
    length: int
    parent: int


class PlannedReading(NamedTuple):
    """What is read next: a trunk (its number), or a prompt (`trunk` is the one it begins with, -1 for none)."""

    trunk: int
    prompt: int | None = None


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """What is read once, and in which order.

    Attributes:
        trunks: parents before their children.
        readings: trunks and prompts in their order: all behind a trunk follow it before another one begins.
        tokens: of all prompts. least: of them, those that differ, which any order reads.
        to_read: tokens that this plan reads. most_pinned: tokens of trunks that are held at a time, at most.
        pinned_bytes: of their pages; None where the model is not known.
    """

    trunks: tuple[Trunk, ...]
    readings: tuple[PlannedReading, ...]
    tokens: int
    least: int
    to_read: int
    most_pinned: int
    pinned_bytes: int | None = None

    @property
    def order(self) -> list[int]:
        """The prompts in their order."""
        return [reading.prompt for reading in self.readings if reading.prompt is not None]

    def __str__(self) -> str:
        held = "" if self.pinned_bytes is None else f", {self.pinned_bytes:,} bytes"
        return (
            f"{len(self.order):,} prompts, {self.tokens:,} tokens: {self.least:,} differ, {self.to_read:,} are read "
            f"({self.saved:.1%} spared); {len(self.trunks):,} common beginnings, of which at most {self.most_pinned:,} "
            f"tokens{held} are held at a time"
        )

    @property
    def saved(self) -> float:
        """Share of the prompts' tokens that are not read."""
        return 1 - self.to_read / self.tokens if self.tokens else 0.0


def plan_batch(
    prompts: Sequence[Ids],
    answers: Sequence[float] | None = None,
    *,
    levels: int | None = None,
    shortest: int = SHORTEST,
) -> BatchPlan:
    """Plan the prompts of a batch.

    Every prompt reads its last token itself, so trunks are beginnings of prompts without it. Trunks come depth first,
    and siblings by expected answers over tokens to read, the largest first (section 4.3).

    Args:
        prompts: token ids of each. answers: tokens expected in answer to each; None: as many for each.
        levels: 1 for the rule of the paper, which lets no trunk continue another; 0 for no trunks; None: as many as
            there are.
        shortest: tokens of a trunk behind its parent, at least.

    Raises:
        OptionError: other levels, fewer than 1 token, or another number of answers than of prompts.
    """
    if levels not in (None, 0, 1):
        raise OptionError(f"levels={levels!r} must be 0, 1, or None for as many as the prompts have")
    if shortest < 1:
        raise OptionError(f"shortest={shortest} must be at least 1 token")
    if answers is not None and len(answers) != len(prompts):
        raise OptionError(f"{len(answers)} answers for {len(prompts)} prompts: give one for each, or None")
    tree = RadixTree.of([prompt[:-1] for prompt in prompts])
    lengths = np.array([len(prompt) for prompt in prompts], dtype=np.int64)
    trunks: list[tuple[int, int, int]] = []
    behind = [-1] * len(prompts)
    if levels != 0:
        trunks, behind = _trunks(tree, shortest) if levels is None else one_level(tree, shortest)
    found = [Trunk(*trunk) for trunk in trunks]
    weights = np.ones(len(prompts)) if answers is None else np.asarray(answers, dtype=np.float64)
    readings, most = _walk(found, behind, lengths, weights)
    own = [trunk.length - _length(found, trunk.parent) for trunk in found]
    rest = int(lengths.sum()) - sum(_length(found, trunk) for trunk in behind)
    # two prompts that are equal differ in nothing, and the last token of one may be in the middle of another
    least = RadixTree.of(prompts).distinct
    return BatchPlan(tuple(found), tuple(readings), int(lengths.sum()), least, sum(own) + rest, most)


def _length(trunks: Sequence[Trunk], number: int) -> int:
    return 0 if number < 0 else trunks[number].length


def _trunks(tree: RadixTree, shortest: int) -> tuple[list[tuple[int, int, int]], list[int]]:
    """Nodes that are far enough behind the last trunk before them; and the trunk of each prompt."""
    trunks: list[tuple[int, int, int]] = []
    of_node = np.full(len(tree.depth), -1, dtype=np.int64)
    depths, parents, begins = tree.depth.tolist(), tree.parent.tolist(), tree.begin.tolist()
    for node in range(1, len(depths)):
        above = int(of_node[parents[node]])
        if depths[node] - (trunks[above][1] if above >= 0 else 0) < shortest:
            of_node[node] = above
        else:
            of_node[node] = len(trunks)
            trunks.append((int(tree.order[begins[node]]), depths[node], above))
    return trunks, of_node[tree.node_of].tolist()


def _walk(
    trunks: Sequence[Trunk], behind: Sequence[int], lengths: np.ndarray, answers: np.ndarray
) -> tuple[list[PlannedReading], int]:
    """Depth first, and the most tokens of trunks that are held at a time: each until all behind it have begun."""
    root, n = len(trunks), len(trunks)
    children: list[list[tuple[float, PlannedReading]]] = [[] for _ in range(n + 1)]
    to_read, expected = np.zeros(n + 1), np.zeros(n + 1)
    for prompt, trunk in enumerate(behind):
        rest = int(lengths[prompt]) - _length(trunks, trunk)
        children[trunk].append((float(answers[prompt]) / max(rest, 1), PlannedReading(trunk, prompt)))
        to_read[trunk] += rest
        expected[trunk] += answers[prompt]
    for number in range(n - 1, -1, -1):  # children come after their parents
        to_read[number] += trunks[number].length - _length(trunks, trunks[number].parent)
        ratio = float(expected[number] / to_read[number])
        children[trunks[number].parent].append((ratio, PlannedReading(number)))
        to_read[trunks[number].parent] += to_read[number]
        expected[trunks[number].parent] += expected[number]
    readings: list[PlannedReading] = []
    held = most = 0
    open_: list[tuple[int, Iterator[tuple[float, PlannedReading]]]] = [(root, _largest_first(children[root]))]
    while open_:
        number, rest_of = open_[-1]
        following = next(rest_of, None)
        if following is None:
            open_.pop()
            held -= 0 if number == root else trunks[number].length - _length(trunks, trunks[number].parent)
            continue
        reading = following[1]
        readings.append(reading)
        if reading.prompt is None:
            held += trunks[reading.trunk].length - _length(trunks, trunks[reading.trunk].parent)
            most = max(most, held)
            open_.append((reading.trunk, _largest_first(children[reading.trunk])))
    return readings, most


def _largest_first(found: list[tuple[float, PlannedReading]]) -> Iterator[tuple[float, PlannedReading]]:
    return iter(sorted(found, key=lambda one: (-one[0], one[1].prompt is None, one[1].prompt or one[1].trunk)))
