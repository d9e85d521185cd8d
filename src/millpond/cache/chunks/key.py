"""Keys of chunks and of the texts before them, from token ids alone."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np


def ids_key(ids: Sequence[int] | np.ndarray) -> str:
    """SHA-256 of token ids, in hex: equal for equal ids alone."""
    return hashlib.sha256(np.asarray(ids, dtype="<i8").tobytes()).hexdigest()


def salted(key: str, salt: str) -> str:
    """The key of a chunk for requests of one salt, which cannot be read from it."""
    return hashlib.sha256(f"{key} ".encode() + salt.encode("utf-8", "surrogatepass")).hexdigest()
