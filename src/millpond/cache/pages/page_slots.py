"""Slots of a page, one for each entry: how many by default, and which numbers can be."""

from __future__ import annotations

from millpond.errors import OptionError

#: Slots per page. Measured: see docs/explanation/page-size.md.
DEFAULT_SLOTS = 32


def check_slots(slots: int) -> None:
    """
    Raises:
        OptionError: `slots` is not a whole number, or not a power of two.
    """
    if not isinstance(slots, int) or slots < 1 or slots & (slots - 1):
        raise OptionError(f"page_slots={slots} must be a power of two")
