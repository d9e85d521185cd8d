"""Autograd mode in which a cache works on its memory, whatever the caller's mode is."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from millpond.errors import UnsupportedModelError

P = ParamSpec("P")
T = TypeVar("T")


def no_autograd(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate `function` to run without gradients and outside inference mode.

    Memory made in inference mode could not be written by a later pass outside it, and memory written with gradients
    would keep every earlier pass alive.
    """

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        with torch.inference_mode(False), torch.no_grad():
            return function(*args, **kwargs)

    return run


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, *inputs: Tensor) -> Tensor:
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise UnsupportedModelError(
            "gradients do not flow through a Millpond cache; train without a cache, or run under torch.no_grad()"
        )


def refuse_gradients(out: Tensor, *inputs: Tensor) -> Tensor:
    """Return `out`, made to raise if a gradient should flow from it to `inputs`."""
    if torch.is_grad_enabled() and any(t.requires_grad for t in inputs):
        cut: Tensor = _Cut.apply(out, *inputs)  # type: ignore[no-untyped-call]
        return cut
    return out
