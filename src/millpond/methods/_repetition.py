"""Options of methods that let the model repeat its prompt."""

from __future__ import annotations

from typing import Annotated

from millpond.errors import OptionError
from millpond.methods._base import MAX_TEXT
from millpond.option_ranges import SOME_POSITIONS, brief
from millpond.policy.token_classes import ID_DIGITS, IDS

#: Text that asks for the repetition, by default.
REPEAT = "Repeat the previous context:"
Ask = Annotated[str, "prompt of the repetition; or token ids such as 5;6; or none"]
RepeatChunk = Annotated[int, "tokens that are repeated in one pass", SOME_POSITIONS]


def asked_ids(method: str, ask: str) -> tuple[int, ...] | None:
    """Return the token ids of what asks for the repetition; None for a text.

    Raises:
        OptionError: it is too long, or no token ids.
    """
    if len(ask) > MAX_TEXT:
        raise OptionError(f"{method}: ask={brief(ask)} has {len(ask):,} characters and may have {MAX_TEXT:,}")
    parts = [] if ask == "none" else ask.split(";")
    if not all(part.isdecimal() for part in parts):
        return None
    ids = tuple(int(part) if len(part) <= ID_DIGITS else -1 for part in parts)
    if not all(IDS.holds(token_id) for token_id in ids):
        raise OptionError(f"{method}: ask={brief(ask)}: token ids must be {IDS}")
    return ids
