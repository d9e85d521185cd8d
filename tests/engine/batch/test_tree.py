"""The radix tree of a batch, beside a count of all beginnings."""

from __future__ import annotations

import numpy as np
import pytest

from millpond.engine.batch_plan import RadixTree


def beginnings(prompts: list[list[int]]) -> dict[tuple[int, ...], int]:
    """How many prompts begin with each text."""
    found: dict[tuple[int, ...], int] = {}
    for prompt in prompts:
        for end in range(1, len(prompt) + 1):
            found[tuple(prompt[:end])] = found.get(tuple(prompt[:end]), 0) + 1
    return found


def random_prompts(seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 2 + seed % 2, rng.integers(0, 9)).tolist() for _ in range(int(rng.integers(0, 40)))]


@pytest.mark.parametrize("seed", range(20))
def test_nodes_are_where_prompts_part(seed: int) -> None:
    prompts = random_prompts(seed)
    tree, counts = RadixTree.of(prompts), beginnings(prompts)
    assert tree.tokens == sum(map(len, prompts))
    assert tree.distinct == len(counts)
    assert sorted(tree.order.tolist()) == list(range(len(prompts)))
    assert [prompts[n] for n in tree.order] == sorted(prompts)
    places = set()
    for node in range(1, len(tree.depth)):
        behind = tree.order[tree.begin[node] : tree.end[node]].tolist()
        text = tuple(prompts[behind[0]][: tree.depth[node]])
        assert len(text) == tree.depth[node]
        assert counts[text] == len(behind) >= 2
        assert all(tuple(prompts[n][: len(text)]) == text for n in behind)
        above = int(tree.parent[node])
        assert above < node
        assert tree.depth[above] < tree.depth[node]
        assert tree.begin[above] <= tree.begin[node] <= tree.end[node] <= tree.end[above]
        places.add(text)
    longest = [max((len(p) for p in places if tuple(prompt[: len(p)]) == p), default=0) for prompt in prompts]
    assert [int(tree.depth[node]) for node in tree.node_of] == longest
    ends = {text for text, n in counts.items() if n >= 2 and _parts(text, counts, n)}
    assert places == ends


def _parts(text: tuple[int, ...], counts: dict[tuple[int, ...], int], n: int) -> bool:
    """Whether not all prompts behind a text go on alike."""
    return all(counts.get((*text, token), 0) < n for token in range(4))


def test_empty_batches_and_prompts() -> None:
    assert RadixTree.of([]).distinct == 0
    tree = RadixTree.of([[], []])
    assert (tree.tokens, tree.distinct, tree.depth.tolist()) == (0, 0, [0])


def test_a_chain_as_deep_as_it_is_long() -> None:
    base = np.arange(1500)
    tree = RadixTree.of([base[:n] for n in range(1500)])
    assert tree.distinct == 1499
    assert tree.depth.tolist() == list(range(1499))
    assert tree.parent.tolist() == list(range(-1, 1498))


def test_one_place_50_000_tokens_deep() -> None:
    base = np.arange(50_000)
    tree = RadixTree.of([np.append(base, 1), np.append(base, 2), base])
    assert tree.depth.tolist() == [0, 50_000]
    assert tree.distinct == 50_002


def test_ids_sort_as_numbers() -> None:
    assert RadixTree.of([[70_000], [255], [256], [2**31]]).order.tolist() == [1, 2, 0, 3]
