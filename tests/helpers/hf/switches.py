"""Switches of a model's layers: what every one of them promises."""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import millpond as mp


def gives_back_after_the_last_of_two_users(
    model: Any,
    use: Callable[[Any], Callable[[], None]],
    switched: Callable[[Any], Sequence[nn.Module]],
    expected: Sequence[nn.Module],
) -> None:
    """Two users of one model, the first of whom leaves twice."""
    first, second = use(model), use(model)
    first()
    first()
    assert switched(model) == expected
    second()
    assert not switched(model)


def gives_back_when_the_cache_is_forgotten(model: Any, switched: Callable[[Any], Sequence[nn.Module]]) -> None:
    """A cache that nobody closes."""
    cache = mp.compress(model, "h2o", 8)
    assert switched(model)
    del cache
    gc.collect()
    assert not switched(model)


def copied_and_pickled(model: Any) -> tuple[Any, Any]:
    """A deep copy of a model, and what a pickle of it gives."""
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return copy.deepcopy(model), torch.load(file, weights_only=False)
