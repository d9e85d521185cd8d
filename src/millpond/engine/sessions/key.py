"""Names of stored turns: keyed hashes of salt, cache format and token ids, from which none of these can be read."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

SUFFIX = ".safetensors"
_NAME = re.compile(r"(\d{1,9})-([0-9a-f]{32})" + re.escape(SUFFIX))
_FOLDER = re.compile(r"[0-9a-f]{32}")


class TurnPlace(NamedTuple):
    """Where a turn is stored.

    Attributes:
        salt, scope: hashes of whose it is, and of how its cache is kept. length: tokens that it has read.
        key: hash of these tokens and the two others.
    """

    salt: str
    scope: str
    length: int
    key: str

    def path(self, folder: Path) -> Path:
        """Its file."""
        return folder / self.salt / self.scope / f"{self.length}-{self.key}{SUFFIX}"

    @classmethod
    def of(cls, path: Path) -> TurnPlace | None:
        """The place whose file this is; None: it is no file of a session."""
        found = _NAME.fullmatch(path.name)
        scope, salt = path.parent.name, path.parent.parent.name
        if found is None or not _FOLDER.fullmatch(scope) or not _FOLDER.fullmatch(salt):
            return None
        return cls(salt, scope, int(found[1]), found[2])


def keyed(secret: bytes, *parts: str | None) -> str:
    """32 hexadecimal digits, equal for equal parts alone; None is another part than any text."""
    found = hashlib.blake2b(key=secret, digest_size=16)
    for part in parts:
        coded = b"" if part is None else part.encode("utf-8", "surrogatepass")
        found.update(f"{'-' if part is None else len(coded)} ".encode() + coded)
    return found.hexdigest()


def places(secret: bytes, salt: str, scope: str, ids: np.ndarray, lengths: Iterable[int]) -> Iterator[TurnPlace]:
    """Where the beginnings of a text of these lengths are stored, the shortest first.

    Args:
        ids: (n,) token ids. lengths: 0 to n.
    """
    numbers = np.ascontiguousarray(ids, dtype="<i8")
    digest, done = hashlib.blake2b(f"{salt} {scope} ".encode(), key=secret, digest_size=16), 0
    for length in sorted(set(lengths)):
        digest.update(numbers[done:length].tobytes())
        done = length
        yield TurnPlace(salt, scope, length, digest.copy().hexdigest())
