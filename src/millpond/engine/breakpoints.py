"""Breakpoints: places of a prompt at which sums over its queries are kept, so that later prompts can go on from there.

Methods that sum over all queries of a prompt can share its beginning only where the sums up to that place are known. A
breakpoint is rounded down to the end of a block of the prefix tree, and lies before the last token, which is read for
every request.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from millpond.engine.request import MOST_BREAKPOINTS
from millpond.errors import OptionError

#: Prompts that wait with which a prompt is compared when it begins.
MOST_COMPARED = 64


def check_breakpoints(breakpoints: Sequence[int], n_tokens: int) -> None:
    """
    Raises:
        OptionError: too many, or one that does not lie in a prompt of `n_tokens`.
    """
    if len(breakpoints) > MOST_BREAKPOINTS:
        raise OptionError(
            f"{len(breakpoints)} breakpoints: must be at most {MOST_BREAKPOINTS}; leave out those that are met least"
        )
    for place in breakpoints:
        if not isinstance(place, int) or isinstance(place, bool) or not 1 <= place <= n_tokens:
            raise OptionError(
                f"breakpoint {place!r} must be a number of tokens from 1 to the prompt's {n_tokens}; leave it out, or "
                "give a place in the prompt"
            )


def block_ends(places: Iterable[int], n_tokens: int, slots: int) -> list[int]:
    """The last ends of blocks of `slots` tokens at or before `places` of a prompt of `n_tokens`, ascending.

    Example:
        >>> block_ends([3, 9, 10, 12], 12, 4)
        [8]
    """
    return sorted({min(place, n_tokens - 1) // slots * slots for place in places} - {0})


def common_ends(prompt: np.ndarray, others: Sequence[np.ndarray], slots: int) -> list[int]:
    """Where others go on from what a prompt begins with: the ends that spare them most tokens, ascending.

    Args:
        prompt: (n,) its tokens. others: for each other prompt, as many of its tokens as it may take over.
        slots: tokens of a block.
    """
    found: list[int] = []
    for other in others[:MOST_COMPARED]:
        most = min(len(other), len(prompt) - 1) // slots * slots
        if most and (other[:slots] == prompt[:slots]).all():
            differs = other[:most] != prompt[:most]
            found.append((int(differs.argmax()) if differs.any() else most) // slots * slots)
    spared = {end: end * sum(one >= end for one in found) for end in set(found)}
    return sorted(sorted(spared, key=lambda end: (-spared[end], end))[:MOST_BREAKPOINTS])
