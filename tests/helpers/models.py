"""Models that tests need and that are not in the package itself."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

#: For tests of pond-text and pond-text-long.
needs_pond_text = pytest.mark.skipif(
    find_spec("millpond_models") is None,
    reason="millpond-models is not installed: pip install ./packages/millpond-models",
)
