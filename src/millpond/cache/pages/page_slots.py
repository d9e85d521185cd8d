"""Slots of a page, one for each entry: the default number, and the check of a number."""

from __future__ import annotations

from millpond.errors import OptionError

#: Slots per page. Measured: see docs/explanation/page-size.md.
DEFAULT_SLOTS = 32


def check_slots(slots: int) -> None:
    """Check a number of slots per page.

    Raises:
        OptionError: `slots` is not a whole number, or not a power of two.
    """
    if not isinstance(slots, int) or slots < 1 or slots & (slots - 1):
        raise OptionError(f"page_slots={slots} must be a power of two")
