"""Learned eviction: discard bits from a small predictor, never much worse than LRU (after arXiv:2210.02775)."""

from __future__ import annotations

from typing import Annotated

from millpond.cache.paging import paging_rule
from millpond.cache.paging.follow import FollowTheBetter
from millpond.cache.paging.predicted_bits import PredictedBits
from millpond.cache.paging.rule import PagingRule
from millpond.option_files import FILE


@paging_rule("learned", paper="arXiv:2210.02775")
def learned(
    pager: Annotated[str, "file of a predictor (millpond train pager); empty: the one of the package", FILE] = "",
) -> PagingRule:
    """Evict what a predictor, refitted at each request, calls safe to discard; as LRU where that was better lately."""
    return FollowTheBetter(PredictedBits.of_file(pager))
