"""Methods and number formats write the tokens that they always wrote, on every processor."""

from __future__ import annotations

from typing import Any

import pytest

from millpond.kernels import native
from tests.helpers.formats import runs
from tests.helpers.formats.write import kept_tokens

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # budgets of a few tokens

KEPT = kept_tokens()
#: Most that log probabilities differ between processors: a code may be rounded the other way.
WITHIN = 1e-4
WITHIN_OF_CODES = 0.1

needs_native = pytest.mark.skipif(not native.is_available(), reason="needs the native kernels")


def check(found: dict[str, Any], kept: str, codec: str = "auto") -> None:
    expected = dict(KEPT[kept])
    within = WITHIN if codec == "auto" else WITHIN_OF_CODES
    assert _flat(found.pop("logprobs")) == pytest.approx(_flat(expected.pop("logprobs")), abs=within)
    assert found == expected


def _flat(values: Any) -> list[float]:
    return [value for row in values for value in row] if isinstance(values[0], list) else values


@pytest.mark.parametrize("name", runs.RUNS)
def test_generate(name: str) -> None:
    kept = f"generate {name}"
    found, margin = runs.generated(name, KEPT[kept]["seed"])
    check(found, kept, runs.RUNS[name][2])
    assert margin > 1e-3


@needs_native
@pytest.mark.parametrize("name", runs.RUNS)
def test_a_deterministic_engine(name: str) -> None:
    kept = f"engine {name}"
    found, margin = runs.deterministic(name, KEPT[kept]["seed"])
    check(found, kept, runs.RUNS[name][2])
    assert margin > 1e-3


@needs_native
def test_a_beginning_that_two_prompts_share() -> None:
    found, _ = runs.shared(KEPT["shared beginning"]["seed"])
    assert found["shared"] > 0
    check(found, "shared beginning")
