"""Radix tree of the prompts of a batch: where their texts part.

Prompts are sorted, neighbours are compared once, and one walk over these common lengths finds every node, so nothing
recurses and a tree may be as deep as a prompt is long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

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
