"""Choice of a paging rule by name, for caches that do not know the future."""

from __future__ import annotations

from os import PathLike, fspath

from millpond.cache.paging import PAGING
from millpond.cache.paging.lru import LeastRecentlyUsed
from millpond.cache.paging.rule import PagingRule
from millpond.errors import OptionError

#: Needs the future; for replays.
_REPLAY = "belady"
_USUAL = "lru"
#: Requests in flight share what their prompts begin with, and nothing is kept beyond them.
LIVE = "live"


def keeps_prompts(choice: bool | str) -> bool:
    """Return whether prompts are kept beyond their requests; `choice` is as of `rule_name`.

    Example:
        >>> keeps_prompts("lru"), keeps_prompts("live"), keeps_prompts(False)
        (True, False, False)
    """
    return bool(choice) and choice != LIVE


def rule_name(choice: bool | str) -> str | None:
    """Return the name of a rule; None for no cache.

    Args:
        choice: A name; True for "lru", False for none; "live" where requests in flight alone share.

    Example:
        >>> rule_name(True), rule_name("learned"), rule_name(False)
        ('lru', 'learned', None)
    """
    if isinstance(choice, str):
        return choice
    return _USUAL if choice else None


def rule_named(choice: bool | str, pager: str | PathLike[str] | None = None) -> PagingRule | None:
    """Return a rule for a cache that begins empty; None for no cache.

    Args:
        choice: See `rule_name`.
        pager: File of the predictor of rules that have one; None for that of the package.

    Raises:
        OptionError: an unknown rule (with a suggestion), one that needs the future, or a pager without a rule that
            takes one.
        DataError: a pager that cannot be read.
    """
    name = rule_name(choice)
    if name is None or name == LIVE:
        if pager is not None:
            raise OptionError(f'pager={fspath(pager)!r} needs a prefix cache that predicts: prefix_cache="learned"')
        return None if name is None else LeastRecentlyUsed()
    if name == _REPLAY:
        other_rules = ", ".join(other for other in PAGING.names() if other != _REPLAY)
        raise OptionError(
            f"paging rule {name!r} must know when each page is used next, which only a replay does (millpond bench "
            f"paging); choose one of {other_rules}"
        )
    entry = PAGING.get(name)
    if pager is None:
        return entry()
    if "pager" not in entry.options:
        raise OptionError(f"pager={fspath(pager)!r}: the paging rule {name!r} predicts nothing; leave pager out")
    return entry(pager=fspath(pager))
