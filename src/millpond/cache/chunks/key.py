"""Keys of chunks and of the texts before them, from token ids alone."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np


def ids_key(ids: Sequence[int] | np.ndarray, salt: str | None = None) -> str:
    """SHA-256 of token ids, in hex: equal for equal ids of the same salt alone. The salt cannot be read from it."""
    digest = hashlib.sha256(np.asarray(ids, dtype="<i8").tobytes())
    if salt is not None:
        digest = hashlib.sha256(digest.digest() + salt.encode("utf-8", "surrogatepass"))
    return digest.hexdigest()
