"""Models that tests need and that are not in the package itself."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import TypeVar

import pytest

from millpond.models.downloads import find_download

F = TypeVar("F", bound=Callable[..., object])

#: For tests of pond-text and pond-text-long.
needs_pond_text = pytest.mark.skipif(
    find_spec("millpond_models") is None,
    reason="millpond-models is not installed: pip install ./packages/millpond-models",
)

_SMALL = find_download("smollm2-135m")
#: A real instruct model for tests: what MILLPOND_REAL_MODEL names, or the one that `make test-real` downloads.
REAL = os.environ.get("MILLPOND_REAL_MODEL") or ("smollm2-135m" if _SMALL and _SMALL.at_hand else None)
NO_REAL = "no real model is here; get one with: millpond models get smollm2-135m"


def needs_real_model(test: F) -> F:
    """Mark a test `real`, and skip it where there is no real model."""
    marked: F = pytest.mark.real(pytest.mark.skipif(REAL is None, reason=NO_REAL)(test))
    return marked
