"""Stored turns: the cache after one finished turn as a safetensors file, its keyed name, and its model's mark."""

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
    """Name of a stored turn.

    Attributes:
        salt: Hash of its owner.
        scope: Hash of how its cache is kept.
        length: Tokens that it has read.
        key: Hash of these tokens and the two others.
    """

    salt: str
    scope: str
    length: int
    key: str

    def path(self, folder: Path) -> Path:
        """Return the path of its file."""
        return folder / self.salt / self.scope / f"{self.length}-{self.key}{SUFFIX}"

    @classmethod
    def of(cls, path: Path) -> TurnPlace | None:
        """Return the name of the turn in a file; None: it is no file of a session."""
        match = _NAME.fullmatch(path.name)
        scope, salt = path.parent.name, path.parent.parent.name
        if match is None or not _FOLDER.fullmatch(scope) or not _FOLDER.fullmatch(salt):
            return None
        return cls(salt, scope, int(match[1]), match[2])


def keyed(secret: bytes, *parts: str | None) -> str:
    """Return 32 hexadecimal digits, equal for equal parts alone.

    None is another part than any text.
    """
    digest = hashlib.blake2b(key=secret, digest_size=16)
    for part in parts:
        coded = b"" if part is None else part.encode("utf-8", "surrogatepass")
        digest.update(f"{'-' if part is None else len(coded)} ".encode() + coded)
    return digest.hexdigest()


def places(secret: bytes, salt: str, scope: str, ids: np.ndarray, lengths: Iterable[int]) -> Iterator[TurnPlace]:
    """Yield the names of the beginnings of a text of these lengths, the shortest first.

    Args:
        secret: Secret of the folder.
        salt: Hash of the owner.
        scope: Hash of how caches are kept.
        ids: Token ids, (n,).
        lengths: Lengths from 0 to n.
    """
    id_bytes = np.ascontiguousarray(ids, dtype="<i8")
    digest, done = hashlib.blake2b(f"{salt} {scope} ".encode(), key=secret, digest_size=16), 0
    for length in sorted(set(lengths)):
        digest.update(id_bytes[done:length].tobytes())
        done = length
        yield TurnPlace(salt, scope, length, digest.copy().hexdigest())


#: Name of this form of the bytes; another one is refused.
FORMAT = "millpond-session-1"
#: The same of turns in codes of a storage codec.
CODED = "millpond-session-coded-1"
_CACHE = "cache."
#: Most bytes of a file's header, and of its entry for one tensor.
_HEADER, _HEADER_PART = 2048, 256


@dataclass(frozen=True, slots=True)
class StoredTurn:
    """A text that was read, and the tensors of its cache.

    Attributes:
        ids: All tokens that the cache has read, (n,) int64.
        tensors: Tensors from `cache_tensors`, on the host.
        exact: Whether no token of it came from a chunk store as another text gave it.
        forgotten: Spans of its tokens that have left the cache, ascending.
        codes: Mark of the storage codec whose codes the tensors hold, see `SequenceCodec`; None: they hold entries.
    """

    ids: np.ndarray
    tensors: Mapping[str, Tensor] = field(repr=False)
    exact: bool = True
    forgotten: tuple[Span, ...] = ()
    codes: str | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return self.ids.nbytes + sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def file_bytes(self) -> int:
        """Most bytes of its file: with a header that names its tensors, and its spans."""
        return self.nbytes + 16 * len(self.forgotten) + _HEADER + _HEADER_PART * (len(self.tensors) + 2)

    def to_bytes(self, place: TurnPlace) -> bytes:
        """Return it as one safetensors buffer with a checksum, which holds its name."""
        tensors = {_CACHE + name: tensor for name, tensor in self.tensors.items()}
        tensors["ids"] = torch.from_numpy(self.ids.astype(np.int64))
        if self.forgotten:
            tensors["forgotten"] = torch.tensor(self.forgotten, dtype=torch.int64)
        about = {"format": FORMAT, "place": _named(place), "exact": str(self.exact)}
        if self.codes is not None:
            about |= {"format": CODED, "codes": self.codes}
        return pack(about, tensors)

    @classmethod
    def from_bytes(cls, data: bytes, place: TurnPlace, ids: np.ndarray) -> StoredTurn:
        """Return the turn that `to_bytes` wrote.

        Args:
            data: Bytes of the file.
            place: Name of the turn.
            ids: Tokens that it must have read, (place.length,).

        Raises:
            DataError: bytes that are cut off or changed.
            CacheMismatchError: a turn of another place or text.
        """
        about, tensors = unpack(data)
        if about.get("format") not in (FORMAT, CODED) or about.get("place") != _named(place):
            raise CacheMismatchError("the file is of another format, or of another session; it is read as missing")
        stored_ids = tensors.pop("ids", torch.zeros(0))
        if stored_ids.dtype != torch.int64 or not np.array_equal(stored_ids.numpy(), ids):
            raise CacheMismatchError("the file is of another text; it is read as missing")
        spans = tensors.pop("forgotten", None)
        forgotten = () if spans is None else spans_of_tensor(spans, len(ids))
        if about.get("exact") not in ("True", "False") or not all(name.startswith(_CACHE) for name in tensors):
            raise DataError("the file holds more than a session; it is read as missing")
        cache_tensors = {name.removeprefix(_CACHE): tensor for name, tensor in tensors.items()}
        codes = about.get("codes")
        if (codes is None) != (about["format"] == FORMAT):
            raise DataError("the file does not say whose codes it holds; it is read as missing")
        return cls(ids, cache_tensors, about["exact"] == "True", forgotten, codes)


def _named(place: TurnPlace) -> str:
    return " ".join(map(str, place))


#: Entries of a configuration that do not change what a model computes.
_IGNORED = {"_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype"}


def session_mark(model: Any, weights: str | None) -> str:
    """Return a mark that is equal for models that compute the same; made before packing.

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
    """Return which adapters of its layers act, and how strongly.

    Their weights alone do not show it.
    """
    adapters = []
    for name, module in model.named_modules():
        active = getattr(module, "active_adapters", None)
        if isinstance(active, list | tuple) and hasattr(module, "scaling"):
            scaling, off = module.scaling, getattr(module, "disable_adapters", False)
            merged = getattr(module, "merged_adapters", [])
            adapters.append(f"{name} {[(adapter, scaling.get(adapter)) for adapter in active]} {merged} {off}")
    return hashlib.sha256("\n".join(adapters).encode()).hexdigest()
