"""Methods that look at keys and values, through every check of the matrix, and against a mask over the full cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import millpond as mp
from tests.helpers.matrix.checks import CHECKS
from tests.helpers.matrix.hidden import equals_a_mask
from tests.helpers.matrix.models import llama, prompts
from tests.matrix import test_invariance as matrix

OPTIONS: dict[str, dict[str, Any]] = {
    "knorm": {"decode": "evict"},
    "keydiff": {"sinks": 1, "recent": 2, "decode": "evict"},
    "lagkv": {"lag": 4, "sinks": 2, "decode": "evict"},
    "chunkkv": {"score": "h2o", "chunk": 3, "decode": "evict"},
    "compactor": {"sinks": 2, "recent": 2, "sketch": 5, "decode": "evict"},
    "criticalkv": {"score": "h2o", "decode": "evict"},
    "rkv": {"window": 4, "kernel": 3, "buffer": 1},
    "expected_attention": {"future": 9, "sinks": 2, "recent": 1, "decode": "evict"},
    "qfilters": {"recent": 2, "decode": "evict"},
    "finch": {"window": 4, "chunk": 9, "decode": "evict"},
}


@pytest.fixture(autouse=True)
def _known_to_the_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, options in OPTIONS.items():
        monkeypatch.setitem(matrix.METHODS, name, options)


@pytest.mark.covering
@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("method", OPTIONS)
def test_matrix(method: str, check: str) -> None:
    CHECKS[check](method)


@pytest.mark.parametrize("method", OPTIONS)
def test_drop_equals_mask(method: str) -> None:
    model, (ids, mask) = llama("gqa"), prompts(2)
    with torch.no_grad(), mp.compress(model, method, 14, page_slots=4, **OPTIONS[method]) as cache:
        equals_a_mask(model, cache, ids, mask, 10, after=lambda: _holds(cache, 14))


def _holds(cache: Any, budget: int) -> None:
    assert all(len(head) == budget for s in (0, 1) for head in cache.positions(1, s))
