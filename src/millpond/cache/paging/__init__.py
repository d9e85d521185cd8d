"""One file per paging rule: which page of a full cache is evicted. A new file registers itself."""

from millpond.cache.paging.rule import PagingRule
from millpond.registry import Registry

PAGING: Registry[PagingRule] = Registry("paging rule", __name__)

paging_rule = PAGING.register


def list_paging_rules() -> list[str]:
    """The names of all paging rules, sorted: those of this package and those that installed packages add."""
    return PAGING.names()
