"""StoredTurn: the cache behind one finished turn as bytes of a safetensors file, and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from millpond.cache.state.spans import Span, spans_of_tensor
from millpond.engine.sessions.key import TurnPlace
from millpond.engine.transfer.container import pack, unpack
from millpond.errors import CacheMismatchError, DataError

#: Names this form of the bytes; another one is refused.
FORMAT = "millpond-session-1"
_CACHE = "cache."
#: Most bytes of a file's header, and of what it says of one tensor.
_HEADER, _HEADER_PART = 2048, 256


@dataclass(frozen=True, slots=True)
class StoredTurn:
    """A text that was read, and what its cache holds.

    Attributes:
        ids: (n,) int64, all tokens that the cache has read. tensors: from `cache_tensors`, on the host.
        exact: no token of it came from a chunk store as another text gave it. forgotten: spans of its tokens that
            have left the cache, ascending.
    """

    ids: np.ndarray
    tensors: Mapping[str, Tensor] = field(repr=False)
    exact: bool = True
    forgotten: tuple[Span, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return self.ids.nbytes + sum(t.nbytes for t in self.tensors.values())

    @property
    def file_bytes(self) -> int:
        """Most bytes of its file: with a header that names its tensors, and its spans."""
        return self.nbytes + 16 * len(self.forgotten) + _HEADER + _HEADER_PART * (len(self.tensors) + 2)

    def to_bytes(self, place: TurnPlace) -> bytes:
        """As one safetensors buffer with a checksum, which names its place."""
        tensors = {_CACHE + name: t for name, t in self.tensors.items()}
        tensors["ids"] = torch.from_numpy(self.ids.astype(np.int64))
        if self.forgotten:
            tensors["forgotten"] = torch.tensor(self.forgotten, dtype=torch.int64)
        return pack({"format": FORMAT, "place": _named(place), "exact": str(self.exact)}, tensors)

    @classmethod
    def from_bytes(cls, data: bytes, place: TurnPlace, ids: np.ndarray) -> StoredTurn:
        """What `to_bytes` was given.

        Args:
            ids: (place.length,) the tokens that it must have read.

        Raises:
            DataError: bytes that are cut off or changed. CacheMismatchError: a turn of another place or text.
        """
        about, tensors = unpack(data)
        if about.get("format") != FORMAT or about.get("place") != _named(place):
            raise CacheMismatchError("the file is of another format, or of another session; it is read as missing")
        found = tensors.pop("ids", torch.zeros(0))
        if found.dtype != torch.int64 or not np.array_equal(found.numpy(), ids):
            raise CacheMismatchError("the file is of another text; it is read as missing")
        spans = tensors.pop("forgotten", None)
        forgotten = () if spans is None else spans_of_tensor(spans, len(ids))
        if about.get("exact") not in ("True", "False") or not all(name.startswith(_CACHE) for name in tensors):
            raise DataError("the file holds more than a session; it is read as missing")
        own = {name.removeprefix(_CACHE): t for name, t in tensors.items()}
        return cls(ids, own, about["exact"] == "True", forgotten)


def _named(place: TurnPlace) -> str:
    return " ".join(map(str, place))
