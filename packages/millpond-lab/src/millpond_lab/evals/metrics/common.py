"""The longest common subsequence, which ROUGE-L, code similarity and copying all rest on."""

from __future__ import annotations

from collections.abc import Hashable, Sequence


def common_length(left: Sequence[Hashable], right: Sequence[Hashable]) -> int:
    """Length of the longest common subsequence, with one whole number as a row of bits (Hyyrö, 2004).

    Example:
        >>> common_length("pond mill", "open hill")
        6
    """
    where: dict[Hashable, int] = {}
    for index, item in enumerate(left):
        where[item] = where.get(item, 0) | 1 << index
    full = (1 << len(left)) - 1
    row = full
    for item in right:
        hits = row & where.get(item, 0)
        row = (row + hits | row - hits) & full
    return len(left) - row.bit_count()


def f_measure(same: float, left: int, right: int) -> float:
    """Harmonic mean of precision and recall of `same` items out of `left` and `right`; 0 where nothing is shared."""
    return 2 * same / (left + right) if same else 0.0
