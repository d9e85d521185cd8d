"""Values that several tests share, each of which runs a part of them in the quick suite."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def in_turns(values: Iterable[Any], first: int, of: int = 2) -> list[Any]:
    """All values, as parameters; every `of`-th, from `first` on, is in the quick suite, and the others are slow.

    Tests that take the same values from different places on meet each of them together.
    """
    return [value if n % of == first else pytest.param(value, marks=pytest.mark.slow) for n, value in enumerate(values)]
