"""Paging rules, one file per rule: which page of a full cache is evicted. A new file registers itself."""

from millpond.cache.paging.rule import PagingRule
from millpond.registry import Registry

#: Rules to compare with, which the extra `lab` adds.
_LAB = ("lfu", "mark0", "mark_predict", "marker")

PAGING: Registry[PagingRule] = Registry("paging rule", __name__, group="millpond.cache.paging", extras={"lab": _LAB})

paging_rule = PAGING.register


def list_paging_rules() -> list[str]:
    """Return the sorted names of all paging rules, those of installed packages included."""
    return PAGING.names()
