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
    """Radix tree of prompts; nodes are the positions where two or more prompts part or end.

    Node 0 is the empty text before all of them. Parents come before their children, and a subtree before the next one.
    Prompts below a node are neighbours in the order of sorting.

    Attributes:
        order: Prompts, sorted by their ids, (n,).
        depth: Tokens from the beginning to each node, (N,).
        parent: Parent of each node, (N,); -1 of node 0.
        begin: Index in `order` of the first prompt below each node, (N,).
        end: Index after the last one, (N,): `order[begin:end]` are the prompts below a node.
        node_of: Last node on the path of each prompt, (n,).
        tokens: Tokens of all prompts.
        distinct: Tokens of them that are not common with a prompt before.
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
        """Return the tree of these prompts; ids are 0 to 2**32 - 1.

        Takes about the bytes of the ids as uint32 besides.
        """
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
        order_array = np.array(order, dtype=np.int64)
        return cls(order_array, depth, parent, begin, end, by_prompt, tokens, tokens - int(common.sum()))


def _sortable(prompt: Ids) -> bytes:
    """Return ids as bytes that sort as the ids do."""
    return np.asarray(prompt).astype(">u4").tobytes()


def _common_lengths(keys: list[bytes]) -> npt.NDArray[np.int64]:
    """Return how many tokens each sorted prompt shares with the one before it, (n,).

    0 for the first.
    """
    lengths = np.zeros(len(keys), dtype=np.int64)
    for number in range(1, len(keys)):
        previous, current = keys[number - 1], keys[number]
        n = min(len(previous), len(current)) // 4
        if n == 0 or previous[:4] != current[:4]:
            continue
        differ = np.frombuffer(previous, "u4", n) != np.frombuffer(current, "u4", n)
        first = int(differ.argmax())
        lengths[number] = first if differ[first] else n
    return lengths


def _nodes(
    common: npt.NDArray[np.int64],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return depth, begin, end and parent of every node.

    Args:
        common: Common lengths of neighbours, (n,).
    """
    depth, begin, end, parent = [0], [0], [len(common)], [-1]
    path = [0]  # from node 0 to the node that is open
    for index in range(1, len(common) + 1):
        length = int(common[index]) if index < len(common) else 0
        first, closed = index - 1, -1
        while depth[path[-1]] > length:
            closed = path.pop()
            end[closed], first = index, begin[closed]
            parent[closed] = path[-1]
        if depth[path[-1]] < length:
            if closed >= 0:
                parent[closed] = len(depth)
            depth.append(length)
            begin.append(first)
            end.append(index)
            parent.append(path[-1])
            path.append(len(depth) - 1)
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
    """A node with prompts below it.

    Attributes:
        length: Tokens that they have in common, from the node above on.
        prompts: Number of prompts.
        members: Prompts, and groups of them.
    """

    length: int
    prompts: int
    members: list[int | _Group] = field(default_factory=list)

    def flat(self) -> list[int]:
        """Return all prompts, in the order of their discovery."""
        prompts: list[int] = []
        open_ = [iter(self.members)]
        while open_:
            member = next(open_[-1], None)
            if member is None:
                open_.pop()
            elif isinstance(member, _Group):
                open_.append(iter(member.members))
            else:
                prompts.append(member)
        return prompts


def one_level(tree: RadixTree, min_length: int) -> tuple[list[tuple[int, int, int]], list[int]]:
    """Return beginnings that continue no other one.

    Args:
        tree: Radix tree of the prompts.
        min_length: Least tokens of a beginning.

    Returns:
        Of each beginning a prompt that has it, its tokens, and -1; and of each prompt its beginning, -1 for none.
    """
    groups = _groups(tree)
    prefix_of_prompt = [-1] * len(tree.node_of)
    prefixes: list[tuple[int, int, int]] = []
    for group in groups:
        members = group.flat()
        if group.length < min_length or len(members) < 2:
            continue
        for prompt in members:
            prefix_of_prompt[prompt] = len(prefixes)
        prefixes.append((members[0], group.length, -1))
    return prefixes, prefix_of_prompt


def _groups(tree: RadixTree) -> list[_Group]:
    """Return the groups directly below the empty text."""
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
            prompts[parents[node]] += [member for member in members if isinstance(member, int)]
        elif members:
            above.append(_Group(length, count, members))
    return below[0]


#: Least tokens of a common beginning after the one that it continues: a request of its own costs about a step.
SHORTEST = 16


class CommonPrefix(NamedTuple):
    """A common beginning of prompts, read once.

    Attributes:
        prompt: One of the prompts that begin with it.
        length: Its tokens.
        parent: Shared prefix that it continues, -1 for none.
    """

    prompt: int
    length: int
    parent: int


class PlannedReading(NamedTuple):
    """A prefix or prompt to read next.

    Attributes:
        prefix: Index of the shared prefix to read; or, with a prompt, of the one that it begins with, -1 for none.
        prompt: Index of the prompt; None: the shared prefix itself is read.
    """

    prefix: int
    prompt: int | None = None


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """Beginnings that are read once, and the order of reading.

    Attributes:
        prefixes: Common beginnings, parents before their children.
        readings: Shared prefixes and prompts in their order: all that begin with a shared prefix follow it before
            another one begins.
        tokens: Tokens of all prompts.
        least: Tokens of them that differ, which any order reads.
        to_read: Tokens that this plan reads.
        most_pinned: Most tokens of shared prefixes that are held at a time.
        pinned_bytes: Bytes of their pages; None where the model is not known.
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
        """Prompts in their order."""
        return [reading.prompt for reading in self.readings if reading.prompt is not None]

    def __str__(self) -> str:
        pinned_text = "" if self.pinned_bytes is None else f", {self.pinned_bytes:,} bytes"
        return (
            f"{len(self.order):,} prompts, {self.tokens:,} tokens: {self.least:,} differ, {self.to_read:,} are read "
            f"({self.saved:.1%} spared); {len(self.prefixes):,} common beginnings, of which at most "
            f"{self.most_pinned:,} tokens{pinned_text} are held at a time"
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
        prompts: Token ids of each.
        answers: Tokens expected in answer to each; None: equally many for each.
        levels: 1 for the rule of the paper, which lets no shared prefix continue another; 0 for no shared prefixes;
            None: all that there are.
        shortest: Least tokens of a shared prefix after its parent.

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
    prefix_of_prompt = [-1] * len(prompts)
    if levels != 0:
        prefixes, prefix_of_prompt = _prefixes(tree, shortest) if levels is None else one_level(tree, shortest)
    common_prefixes = [CommonPrefix(*prefix) for prefix in prefixes]
    weights = np.ones(len(prompts)) if answers is None else np.asarray(answers, dtype=np.float64)
    readings, max_pinned = _walk(common_prefixes, prefix_of_prompt, lengths, weights)
    own_lengths = [prefix.length - _length(common_prefixes, prefix.parent) for prefix in common_prefixes]
    rest_tokens = int(lengths.sum()) - sum(_length(common_prefixes, prefix) for prefix in prefix_of_prompt)
    # two equal prompts do not differ at all, and the last token of one may be in the middle of another
    distinct = RadixTree.of(prompts).distinct
    return BatchPlan(
        tuple(common_prefixes),
        tuple(readings),
        int(lengths.sum()),
        distinct,
        sum(own_lengths) + rest_tokens,
        max_pinned,
    )


def _length(prefixes: Sequence[CommonPrefix], number: int) -> int:
    return 0 if number < 0 else prefixes[number].length


def _prefixes(tree: RadixTree, shortest: int) -> tuple[list[tuple[int, int, int]], list[int]]:
    """Return nodes `shortest` tokens after the shared prefix above, and that of each prompt."""
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
    prefixes: Sequence[CommonPrefix], prefix_of_prompt: Sequence[int], lengths: np.ndarray, answers: np.ndarray
) -> tuple[list[PlannedReading], int]:
    """Return the readings depth first, and the most tokens of shared prefixes held at a time.

    Each shared prefix is held until all that begin with it have begun.
    """
    root, n = len(prefixes), len(prefixes)
    children: list[list[tuple[float, PlannedReading]]] = [[] for _ in range(n + 1)]
    to_read, expected = np.zeros(n + 1), np.zeros(n + 1)
    for prompt, prefix in enumerate(prefix_of_prompt):
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
    pinned = max_pinned = 0
    stack: list[tuple[int, Iterator[tuple[float, PlannedReading]]]] = [(root, _largest_first(children[root]))]
    while stack:
        number, rest_of = stack[-1]
        following = next(rest_of, None)
        if following is None:
            stack.pop()
            pinned -= 0 if number == root else prefixes[number].length - _length(prefixes, prefixes[number].parent)
            continue
        reading = following[1]
        readings.append(reading)
        if reading.prompt is None:
            pinned += prefixes[reading.prefix].length - _length(prefixes, prefixes[reading.prefix].parent)
            max_pinned = max(max_pinned, pinned)
            stack.append((reading.prefix, _largest_first(children[reading.prefix])))
    return readings, max_pinned


def _largest_first(ratios: list[tuple[float, PlannedReading]]) -> Iterator[tuple[float, PlannedReading]]:
    return iter(
        sorted(ratios, key=lambda entry: (-entry[0], entry[1].prompt is None, entry[1].prompt or entry[1].prefix))
    )
