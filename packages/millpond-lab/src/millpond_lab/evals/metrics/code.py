"""Similarity of two lines of code."""

from __future__ import annotations

from collections.abc import Sequence

from millpond_lab.evals.metrics.common import common_length

#: A line with one of these is prose, a comment or a fence of Markdown.
_NOT_CODE = ("`", "#", "//")


def similarity(left: str, right: str) -> float:
    """1 - d / (both lengths), with d the insertions and deletions that turn one text into the other.

    Example:
        >>> similarity("return x", "return y")  # 7 shared, of 16
        0.875
    """
    return 2 * common_length(left, right) / (len(left) + len(right)) if left or right else 1.0


def code_similarity(references: Sequence[str], answer: str) -> float:
    """The best similarity of the answer's first line of code (LongBench's rule) with a reference.

    Example:
        >>> code_similarity(["x = 1"], "# set x\\nx = 1\\ny = 2")
        1.0
    """
    lines = answer.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in _NOT_CODE)), "")
    return max(similarity(line, reference) for reference in references)
