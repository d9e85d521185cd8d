"""Scalars of numpy and torch as Python's own numbers, where a user may pass any of them."""

from __future__ import annotations

from typing import Any


def number(value: Any) -> Any:
    """Return a scalar of numpy or torch as Python's int, float or bool; all else as it is.

    A scalar has no dimensions.

    Example:
        >>> import numpy as np
        >>> number(np.int64(512)), number(np.float32(0.5)), number("20%")
        (512, 0.5, '20%')
    """
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        return value.item()
    return value
