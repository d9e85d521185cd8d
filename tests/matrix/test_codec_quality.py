"""Few bits cost the bundled model nothing where everything is kept, and codes beside eviction cost no more than it."""

from functools import cache

import pytest

from millpond.cli.demo.task import DemoOutcome, DemoTask, run_method
from millpond.models.load import load_model


@cache
def outcome(method: str, codec: str) -> DemoOutcome:
    return run_method(load_model("pond-recall"), DemoTask.draw(1024, 32, 5), method, "20%", codec)


@pytest.mark.parametrize(("codec", "most"), [("int8", 0.62), ("int4", 0.38), ("kivi4", 0.44), ("rotated4", 0.35)])
def test_recall_of_a_full_cache(codec: str, most: float) -> None:
    found = outcome("full", codec)
    assert found.right >= 0.99 * outcome("full", "bf16").right
    assert found.share < most


def test_recall_beside_eviction() -> None:
    """A fifth of the entries in four bits: a tenth of the bytes."""
    found = outcome("compactor", "rotated4")
    assert found.right >= 31
    assert found.share < 0.1
