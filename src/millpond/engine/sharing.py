"""Rules of what prompts can share: pages before any plan, and which of these a storage codec can code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from millpond.cache.batch_cache import Pages
from millpond.cache.pages.page_table import PageTable
from millpond.cache.pages.ref_counted_pool import Pool
from millpond.runner.cache_factory import CacheFactory


def can_share(cache_factory: CacheFactory) -> bool:
    """Return whether a plan needs only keys, values and sums of a prompt's beginning.

    The sums are those over its queries.
    """
    policy = cache_factory.policy
    moves = policy.prefill != "once" or policy.positions != "absolute"
    observes = any(codec.balanced or codec.prune > 0 or codec.prune_values > 0 for codec in cache_factory.pools.codecs)
    if (
        cache_factory.slots is not None or policy.gates is not None
    ):  # the states at the end of what is shared are not kept
        return False
    if policy.sums_prompt and policy.scores_entries:  # both are kept in one place
        return False
    return not (moves or observes or cache_factory.whole_prompt)


def sum_pages(*parts: Pages) -> Pages:
    """Return the sum of pages."""
    need: Counter[Pool] = Counter()
    for pages in parts:
        need.update(pages)
    return dict(need)


def can_code(tables: Sequence[PageTable]) -> bool:
    """Return whether a storage codec holds all that pages of a prompt do.

    It has no place for masses.
    """
    return not any(table.pool.arrays.masses for table in tables)
