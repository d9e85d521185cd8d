"""Plan of a batch (BatchLLM, arXiv:2412.03594): which prefixes are read once, from a radix tree of its prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from millpond.errors import OptionError

#: Token ids of one prompt.
Ids = Sequence[int] | npt.NDArray[np.integer]


@dataclass(frozen=True, slots=True)
class RadixTree:
    """Nodes are the places where two or more prompts part or end; node 0 is the empty text before all of them.

    Parents come before their children, and a subtree before the next one. Prompts behind a node are neighbours in the
    order of sorting.

    Attributes:
        order: (n,) the prompts, sorted by their ids.
        depth: (N,) tokens from the beginning to a node. parent: (N,) of each node, -1 of node 0.
        begin, end: (N,) the prompts behind a node are `order[begin:end]`.
        node_of: (n,) the last node on the way of each prompt.
        tokens: of all prompts. distinct: of them, those that are not common with a prompt before.
    """

    order: npt.NDArray[np.int64]
    depth: npt.NDArray[np.int64]
    parent: npt.NDArray[np.int64]
    begin: npt.NDArray[np.int64]
    end: npt.NDArray[np.int64]
    node_of: npt.NDArray[np.int64]
    tokens: int
    distinct: int

    @classmethod
    def of(cls, prompts: Sequence[Ids]) -> RadixTree:
        """The tree of these prompts; ids are 0 to 2**32 - 1. Takes about the bytes of the ids as uint32 besides."""
        keys = [_sortable(prompt) for prompt in prompts]
        order = sorted(range(len(keys)), key=keys.__getitem__)
        common = _common_lengths([keys[number] for number in order])
        tokens = sum(map(len, keys)) // 4
        depth, begin, end, parent = _nodes(common)
        node_of = np.zeros(len(keys), dtype=np.int64)
        for node, (first, last) in enumerate(zip(begin.tolist(), end.tolist(), strict=True)):
            node_of[first:last] = node  # deeper nodes come later
        by_prompt = np.empty_like(node_of)
        by_prompt[order] = node_of
        numbers = np.array(order, dtype=np.int64)
        return cls(numbers, depth, parent, begin, end, by_prompt, tokens, tokens - int(common.sum()))


def _sortable(prompt: Ids) -> bytes:
    """Ids as bytes that sort as the ids do."""
    return np.asarray(prompt).astype(">u4").tobytes()


def _common_lengths(keys: list[bytes]) -> npt.NDArray[np.int64]:
    """(n,) tokens that each of the sorted prompts has in common with the one before it; 0 of the first."""
    found = np.zeros(len(keys), dtype=np.int64)
    for number in range(1, len(keys)):
        before, after = keys[number - 1], keys[number]
        n = min(len(before), len(after)) // 4
        if n == 0 or before[:4] != after[:4]:
            continue
        differ = np.frombuffer(before, "u4", n) != np.frombuffer(after, "u4", n)
        first = int(differ.argmax())
        found[number] = first if differ[first] else n
    return found


def _nodes(
    common: npt.NDArray[np.int64],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Depth, begin, end and parent of every node, from the common lengths of neighbours."""
    depth, begin, end, parent = [0], [0], [len(common)], [-1]
    way = [0]  # from node 0 to the node that is open
    for place in range(1, len(common) + 1):
        length = int(common[place]) if place < len(common) else 0
        first, closed = place - 1, -1
        while depth[way[-1]] > length:
            closed = way.pop()
            end[closed], first = place, begin[closed]
            parent[closed] = way[-1]
        if depth[way[-1]] < length:
            if closed >= 0:
                parent[closed] = len(depth)
            depth.append(length)
            begin.append(first)
            end.append(place)
            parent.append(way[-1])
            way.append(len(depth) - 1)
    starts, depths = np.array(begin, dtype=np.int64), np.array(depth, dtype=np.int64)
    order = np.lexsort((depths, starts))
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    above = np.array(parent, dtype=np.int64)[order]
    return (
        depths[order],
        starts[order],
        np.array(end, dtype=np.int64)[order],
        np.where(above < 0, -1, rank[np.maximum(above, 0)]),
    )


@dataclass(slots=True)
class _Group:
    """A node with prompts behind it; length: of what they have in common, from the node above on."""

    length: int
    prompts: int
    members: list[int | _Group] = field(default_factory=list)

    def flat(self) -> list[int]:
        """All prompts, in order of their discovery."""
        found: list[int] = []
        open_ = [iter(self.members)]
        while open_:
            one = next(open_[-1], None)
            if one is None:
                open_.pop()
            elif isinstance(one, _Group):
                open_.append(iter(one.members))
            else:
                found.append(one)
        return found


def one_level(tree: RadixTree, shortest: int) -> tuple[list[tuple[int, int, int]], list[int]]:
    """Beginnings that follow no other one.

    Args:
        shortest: tokens of a beginning, at least.

    Returns:
        Of each beginning a prompt that has it, its tokens, and -1; and of each prompt its beginning, -1 for none.
    """
    groups = _groups(tree)
    behind = [-1] * len(tree.node_of)
    prefixes: list[tuple[int, int, int]] = []
    for group in groups:
        members = group.flat()
        if group.length < shortest or len(members) < 2:
            continue
        for prompt in members:
            behind[prompt] = len(prefixes)
        prefixes.append((members[0], group.length, -1))
    return prefixes, behind


def _groups(tree: RadixTree) -> list[_Group]:
    """The groups directly behind the empty text."""
    depths, parents = tree.depth.tolist(), tree.parent.tolist()
    prompts: list[list[int]] = [[] for _ in depths]
    for prompt, node in enumerate(tree.node_of.tolist()):
        prompts[node].append(prompt)
    below: list[list[_Group]] = [[] for _ in depths]
    for node in range(len(depths) - 1, 0, -1):  # children come after their parents
        length = depths[node] - depths[parents[node]]
        members: list[int | _Group] = list(prompts[node])
        count = len(members)
        above = below[parents[node]]
        for group in below[node]:
            if (group.prompts - 1) * group.length > length:
                group.length += length
                above.append(group)
            else:
                members.append(group)
                count += group.prompts
        below[node] = []
        if len(members) == 1 and isinstance(members[0], _Group):  # nothing else is behind it
            members[0].length += length
            above.append(members[0])
        elif count == 1:
            prompts[parents[node]] += [one for one in members if isinstance(one, int)]
        elif members:
            above.append(_Group(length, count, members))
    return below[0]


#: Tokens that a common beginning has at least behind the one before it: a request of its own costs about a step.
SHORTEST = 16


class CommonPrefix(NamedTuple):
    """A common beginning of prompts, read once.

    Attributes:
        prompt: one of the prompts that begin with it. length: its tokens.
        parent: the shared prefix that it continues, -1 for none.
    """

    prompt: int
    length: int
    parent: int


class PlannedReading(NamedTuple):
    """What is read next: a shared prefix (its number), or a prompt (`prefix` is the one it begins with, -1 for
    none)."""

    prefix: int
    prompt: int | None = None


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """What is read once, and in which order.

    Attributes:
        prefixes: parents before their children.
        readings: shared prefixes and prompts in their order: all behind a shared prefix follow it before another one
            begins.
        tokens: of all prompts. least: of them, those that differ, which any order reads.
        to_read: tokens that this plan reads. most_pinned: tokens of shared prefixes that are held at a time, at most.
        pinned_bytes: of their pages; None where the model is not known.
    """

    prefixes: tuple[CommonPrefix, ...]
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
            f"({self.saved:.1%} spared); {len(self.prefixes):,} common beginnings, of which at most "
            f"{self.most_pinned:,} tokens{held} are held at a time"
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

    Every prompt reads its last token itself, so shared prefixes are beginnings of prompts without it. Shared prefixes
    come depth first, and siblings by expected answers over tokens to read, the largest first (section 4.3).

    Args:
        prompts: token ids of each. answers: tokens expected in answer to each; None: as many for each.
        levels: 1 for the rule of the paper, which lets no shared prefix continue another; 0 for no shared prefixes;
            None: as many as there are.
        shortest: tokens of a shared prefix behind its parent, at least.

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
    prefixes: list[tuple[int, int, int]] = []
    behind = [-1] * len(prompts)
    if levels != 0:
        prefixes, behind = _prefixes(tree, shortest) if levels is None else one_level(tree, shortest)
    found = [CommonPrefix(*prefix) for prefix in prefixes]
    weights = np.ones(len(prompts)) if answers is None else np.asarray(answers, dtype=np.float64)
    readings, most = _walk(found, behind, lengths, weights)
    own = [prefix.length - _length(found, prefix.parent) for prefix in found]
    rest = int(lengths.sum()) - sum(_length(found, prefix) for prefix in behind)
    # two prompts that are equal differ in nothing, and the last token of one may be in the middle of another
    least = RadixTree.of(prompts).distinct
    return BatchPlan(tuple(found), tuple(readings), int(lengths.sum()), least, sum(own) + rest, most)


def _length(prefixes: Sequence[CommonPrefix], number: int) -> int:
    return 0 if number < 0 else prefixes[number].length


def _prefixes(tree: RadixTree, shortest: int) -> tuple[list[tuple[int, int, int]], list[int]]:
    """Nodes that are far enough behind the last shared prefix before them; and the shared prefix of each prompt."""
    prefixes: list[tuple[int, int, int]] = []
    of_node = np.full(len(tree.depth), -1, dtype=np.int64)
    depths, parents, begins = tree.depth.tolist(), tree.parent.tolist(), tree.begin.tolist()
    for node in range(1, len(depths)):
        above = int(of_node[parents[node]])
        if depths[node] - (prefixes[above][1] if above >= 0 else 0) < shortest:
            of_node[node] = above
        else:
            of_node[node] = len(prefixes)
            prefixes.append((int(tree.order[begins[node]]), depths[node], above))
    return prefixes, of_node[tree.node_of].tolist()


def _walk(
    prefixes: Sequence[CommonPrefix], behind: Sequence[int], lengths: np.ndarray, answers: np.ndarray
) -> tuple[list[PlannedReading], int]:
    """Depth first, and the most tokens of shared prefixes that are held at a time: each until all behind it have
    begun."""
    root, n = len(prefixes), len(prefixes)
    children: list[list[tuple[float, PlannedReading]]] = [[] for _ in range(n + 1)]
    to_read, expected = np.zeros(n + 1), np.zeros(n + 1)
    for prompt, prefix in enumerate(behind):
        rest = int(lengths[prompt]) - _length(prefixes, prefix)
        children[prefix].append((float(answers[prompt]) / max(rest, 1), PlannedReading(prefix, prompt)))
        to_read[prefix] += rest
        expected[prefix] += answers[prompt]
    for number in range(n - 1, -1, -1):  # children come after their parents
        to_read[number] += prefixes[number].length - _length(prefixes, prefixes[number].parent)
        ratio = float(expected[number] / to_read[number])
        children[prefixes[number].parent].append((ratio, PlannedReading(number)))
        to_read[prefixes[number].parent] += to_read[number]
        expected[prefixes[number].parent] += expected[number]
    readings: list[PlannedReading] = []
    held = most = 0
    open_: list[tuple[int, Iterator[tuple[float, PlannedReading]]]] = [(root, _largest_first(children[root]))]
    while open_:
        number, rest_of = open_[-1]
        following = next(rest_of, None)
        if following is None:
            open_.pop()
            held -= 0 if number == root else prefixes[number].length - _length(prefixes, prefixes[number].parent)
            continue
        reading = following[1]
        readings.append(reading)
        if reading.prompt is None:
            held += prefixes[reading.prefix].length - _length(prefixes, prefixes[reading.prefix].parent)
            most = max(most, held)
            open_.append((reading.prefix, _largest_first(children[reading.prefix])))
    return readings, most


def _largest_first(found: list[tuple[float, PlannedReading]]) -> Iterator[tuple[float, PlannedReading]]:
    return iter(sorted(found, key=lambda one: (-one[0], one[1].prompt is None, one[1].prompt or one[1].prefix)))
