"""Features of an access by which a predictor tells pages that are used again soon: eleven numbers, in steps."""

from __future__ import annotations

from millpond.cache.paging.rule import PageFacts

#: Each number and its steps; a weight belongs to each step.
STEPS = {
    "depth": 12,
    "length": 12,
    "rest": 12,
    "accesses": 10,
    "gap": 13,
    "gap_before": 13,
    "known": 12,
    "new": 12,
    "is_known": 2,
    "beyond_known": 12,
    "within_known": 12,
}
N_FEATURES, N_WEIGHTS = len(STEPS), sum(STEPS.values())
#: The first weight of each number.
FIRST = tuple(sum(list(STEPS.values())[:at]) for at in range(N_FEATURES))
_DEPTH, _LENGTH, _REST, _ACCESSES, _GAP, _GAP_BEFORE, _KNOWN, _NEW, _IS_KNOWN, _BEYOND, _WITHIN = FIRST
#: Steps from this number of accesses on are one.
MOST_ACCESSES = STEPS["accesses"] - 1
#: Steps of a gap, the first for none.
_GAP_STEPS = STEPS["gap"]


def gap_step(gap: int) -> int:
    """Step of a gap between two accesses of a page, counted in accesses of all pages: 1 up to 127, 2 up to 255, ..."""
    return min(max(gap.bit_length() - 6, 1), _GAP_STEPS - 1)


def steps_of(facts: PageFacts, accesses: int, gap: int, gap_before: int) -> tuple[int, ...]:
    """Which weight each number of an access takes: N_FEATURES places in N_WEIGHTS weights.

    Args:
        accesses: of this page before, at most MOST_ACCESSES. gap: step of the time since the last one, 0 for none.
        gap_before: of the one before.
    """
    _, _, _, depth, length, known, _, _ = facts
    beyond = depth - known
    return (
        _DEPTH + _log(depth),
        _LENGTH + _log(length),
        _REST + _log(length - depth),
        _ACCESSES + accesses,
        _GAP + gap,
        _GAP_BEFORE + gap_before,
        _KNOWN + _log(known),
        _NEW + _log(length - known),
        _IS_KNOWN + (beyond < 0),
        _BEYOND + (_log(beyond) if beyond > 0 else 0),
        _WITHIN + (_log(-beyond) if beyond < 0 else 0),
    )


def _log(number: int) -> int:
    """0 for 0, 1 for 1, 2 for 2 and 3, ..., 11 from 1,024 on."""
    return min(number.bit_length(), 11)
