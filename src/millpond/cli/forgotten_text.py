"""Words for what a cache has forgotten, in the lines of `millpond generate` and `chat`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from millpond.engine.outputs import Forgotten


def forgotten_text(found: Forgotten, of: str = "the prompt") -> str:
    """The shares of a span that no head, and fewer than half of the heads, still hold.

    Example:
        >>> from millpond.engine.outputs import Forgotten
        >>> forgotten_text(Forgotten(0, 400, 0.125, 0.5, 0.4))
        'of the prompt 12.5% held by no head, 50.0% by fewer than half'
        >>> forgotten_text(Forgotten(0, 400, 0.0, 0.0, 1.0))
        'nothing of the prompt forgotten'
    """
    if not found.fewer_than_half:
        return f"nothing of {of} forgotten"
    return f"of {of} {found.share:.1%} held by no head, {found.fewer_than_half:.1%} by fewer than half"
