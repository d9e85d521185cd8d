"""Output of the command line: results to stdout, notes and errors to stderr, words for what a cache evicted."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

if TYPE_CHECKING:
    from millpond.engine.outputs import Forgotten


def output() -> Console:
    """Return the console of results."""
    return Console()


def errors() -> Console:
    """Return the console of notes and errors."""
    return Console(stderr=True)


@contextmanager
def notes() -> Iterator[None]:
    """Show what the library warns of as one yellow sentence each, after the block."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        try:
            yield
        finally:
            for text in dict.fromkeys(str(w.message) for w in caught if issubclass(w.category, UserWarning)):
                errors().print(f"[yellow]note:[/] {escape(text)}", soft_wrap=True, highlight=False)


def held_of(kv_bytes: int, unused_bytes: int, full_kv_bytes: int) -> str:
    """Return a cache's bytes beside a full one in the model's dtype, and unfilled page bytes.

    Example:
        >>> held_of(327680, 17920, 309760)
        'KV 320.0 KiB held, 17.5 KiB of it in unfilled pages, full cache 302.5 KiB (106%)'
    """
    rounding = f" {size(unused_bytes)} of it in unfilled pages," if unused_bytes else ""
    share = kv_bytes / full_kv_bytes if full_kv_bytes else 1.0
    return f"KV {size(kv_bytes)} held,{rounding} full cache {size(full_kv_bytes)} ({share:.0%})"


#: Seconds between lines of progress where the output is no terminal.
LINE_EVERY_S = 10.0


@contextmanager
def working(what: str) -> Iterator[None]:
    """Show that something long continues.

    On a terminal it is a spinner, elsewhere a line now and one every ten seconds.
    """
    from millpond.models.downloads import progress, tell

    if not errors().is_terminal:
        tell(f"{what} ...")
    with progress(what, every_s=LINE_EVERY_S):
        yield


def size(n_bytes: float) -> str:
    """Return bytes as people read them, in binary units.

    Example:
        >>> size(1536), size(3 * 2**20)
        ('1.5 KiB', '3.0 MiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n_bytes < 1024 or unit == "GiB":
            break
        n_bytes /= 1024
    return f"{n_bytes:.0f} B" if unit == "B" else f"{n_bytes:.1f} {unit}"


def forgotten_text(forgotten: Forgotten, of: str = "the prompt") -> str:
    """Return the shares of a span that no head, and fewer than half of the heads, still hold.

    Example:
        >>> from millpond.engine.outputs import Forgotten
        >>> forgotten_text(Forgotten(0, 400, 0.125, 0.5, 0.4))
        'of the prompt 12.5% held by no head, 50.0% by fewer than half'
        >>> forgotten_text(Forgotten(0, 400, 0.0, 0.0, 1.0))
        'nothing of the prompt forgotten'
    """
    if not forgotten.fewer_than_half:
        return f"nothing of {of} forgotten"
    return f"of {of} {forgotten.share:.1%} held by no head, {forgotten.fewer_than_half:.1%} by fewer than half"
