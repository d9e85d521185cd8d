"""Pareto front of bytes and quality."""

from __future__ import annotations

import math
from collections.abc import Iterable

from millpond_lab.evals.decoding.record import SummaryRow


def pareto_front(rows: Iterable[SummaryRow]) -> list[SummaryRow]:
    """Those rows of one task that are better than every row of fewer or as many bytes, ascending in bytes."""
    best = -math.inf
    found = []
    for row in sorted(rows, key=lambda row: (row.kv_bytes, -quality_of(row))):
        if quality_of(row) > best:
            best = quality_of(row)
            found.append(row)
    return found


def quality_of(row: SummaryRow) -> float:
    """The score, turned so that more is better."""
    return -row.score if row.better == "lower" else row.score
