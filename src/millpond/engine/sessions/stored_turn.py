"""StoredTurn: the cache after one finished turn as a safetensors file, its keyed name, and its model's mark."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from millpond.cache.state.spans import spans_of_tensor
from millpond.engine.transfer.container import pack, unpack
from millpond.errors import CacheMismatchError, DataError
from millpond.hf.model_support import unwrapped
from millpond.kernels.checksum import crc32
from millpond.prompt_marks import Span

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


#: Entries of a configuration that do not change what a model computes.
_IGNORED = {"_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype"}


def session_mark(model: Any, weights: str | None) -> str:
    """Equal for models that compute the same: made before `weights` are packed.

    Unlike `fingerprint` it reads every number, so that two adapters of one name differ wherever they differ. That takes
    about a second per 2 GB.
    """
    model = unwrapped(model)
    digest = hashlib.sha256(f"{type(model).__name__} {model.dtype} {weights} {_adapters(model)}".encode())
    to_dict = getattr(getattr(model, "config", None), "to_dict", dict)
    settings: dict[str, Any] = to_dict()
    kept = {name: value for name, value in settings.items() if name not in _IGNORED}
    digest.update(json.dumps(kept, sort_keys=True, default=lambda value: type(value).__name__).encode())
    for name, tensor in sorted([*model.named_parameters(), *model.named_buffers()], key=lambda one: one[0]):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {_checksum(tensor)} ".encode())
    return digest.hexdigest()


def _checksum(tensor: torch.Tensor) -> int:
    if tensor.is_meta:
        return 0
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return crc32(flat)


def _adapters(model: Any) -> str:
    """Which adapters of its layers act, in which strength: their weights alone do not say it."""
    found = []
    for name, module in model.named_modules():
        active = getattr(module, "active_adapters", None)
        if isinstance(active, list | tuple) and hasattr(module, "scaling"):
            scaling, off = module.scaling, getattr(module, "disable_adapters", False)
            merged = getattr(module, "merged_adapters", [])
            found.append(f"{name} {[(one, scaling.get(one)) for one in active]} {merged} {off}")
    return hashlib.sha256("\n".join(found).encode()).hexdigest()
