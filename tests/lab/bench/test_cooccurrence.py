"""The script that correlates attention with co-occurrence: its measures by hand."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest
import torch

QUALITY = Path(__file__).parents[3] / "benchmarks" / "quality"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(QUALITY)
        return importlib.import_module("cooccurrence")


def test_a_degree_counts_different_neighbours(script: ModuleType) -> None:
    ids = torch.tensor([0, 1, 0, 1, *[9] * 6, 2])
    brute = [
        len({int(ids[j]) for i in range(len(ids)) if ids[i] == word for j in range(len(ids)) if 0 < abs(i - j) <= 5})
        for word in range(10)
    ]
    assert script.degrees(ids, 10).tolist() == brute
    assert brute[:3] == [3, 3, 1]


def test_words_are_compared_without_the_first_tokens(script: ModuleType) -> None:
    ids = torch.tensor([7, 7, 7, 7, 1, 2, 2, 2, 3])
    columns = torch.tensor([99.0, 99, 99, 99, 3, 2, 2, 2, 1])
    degree = torch.arange(10)
    gathered, per_place = script.by_word(columns, ids, degree)
    assert gathered == pytest.approx(-0.5), "3, 6 and 1 against 1, 2 and 3"
    assert per_place == pytest.approx(-1.0)


def test_the_largest_entry_is_heavy_or_not(script: ModuleType) -> None:
    length, first = 100, 4
    weights = torch.zeros(2, length, length)
    weights[0, :, 0] = 1.0  # a sink: heavy, unless it is left out
    weights[1] = torch.eye(length).roll(-1, 1).tril()  # each looks at the entry before it, which nobody looked at
    weights[1, 0, 0] = 1.0
    assert script.argmax_is_heavy(weights[:1], 0) == 1.0
    assert script.argmax_is_heavy(weights[1:], 0) == 0.0
    weights[0, :, first + 2] = 0.5
    assert script.argmax_is_heavy(weights[:1], first) == 1.0


def test_means_and_intervals_are_over_windows(script: ModuleType) -> None:
    values = torch.zeros(4, 3, len(script.NAMES))
    values[:, 0, 0] = torch.tensor([0.2, 0.4, 0.6, 0.8])
    found = script.summary(values)["gathered"]
    assert found["mean"] == pytest.approx(0.5 / 3, abs=1e-4)
    assert found["layers"] == [0.5, 0.0, 0.0]
    assert found["interval"][0] < found["mean"] < found["interval"][1]
