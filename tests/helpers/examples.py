"""How many examples a property test draws: a share of what the profile of Hypothesis names."""

from __future__ import annotations

from hypothesis import settings

#: Examples of a test that asks for 100: in `make test`, and in `make test-slow`, which runs all property tests again.
QUICK, THOROUGH = 20, 100
_FEWEST = 3


def examples(thorough: int) -> int:
    """What a test draws in this profile that draws `thorough` ones in the thorough profile; at least three."""
    return max(min(thorough, _FEWEST), thorough * settings.default.max_examples // THOROUGH)
