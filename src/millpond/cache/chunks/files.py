"""Disk tier of a chunk store: one safetensors file per variant, verified whenever it is read.

A file is written under another name and renamed, so that it is either whole or absent, and it never changes. Its header
holds the format, the mark of the model, what is known of the variant, and a checksum of each tensor, all under a
checksum of their own. Files that fail are removed and counted; nothing here raises because of what lies in the folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from millpond.cache.atomic_files import PART, publish, remove_file, write_part
from millpond.cache.chunks.shape import StoredShape
from millpond.cache.chunks.variant import ChunkVariant, VariantFacts
from millpond.errors import DataError, OptionError

T = TypeVar("T")

#: Name of the format of the files, and of the file that names the model of a folder.
FORMAT = "millpond-chunk-1"
#: Longest header that is read, in bytes.
MOST_HEADER = 16 << 20
#: Age of unfinished files after which they are left-overs of a process that was killed, in seconds.
LEFT_OVER_S = 3600.0
SUFFIX, _NAME = ".safetensors", "store.json"


class TornFileError(DataError):
    """A file that is cut or not as it was written."""


class ForeignFileError(DataError):
    """A file of another model, format or chunk."""


class ChunkFiles:
    """The folder of one store.

    Args:
        folder: is made where it does not exist. limit: most bytes of all files.

    Attributes:
        counts: of torn, foreign, removed and evicted files, of write_failures and read_failures. nbytes: of all files.

    Raises:
        OptionError: the folder holds chunks of another model, or cannot be made.
    """

    def __init__(self, folder: Path, limit: int, shape: StoredShape) -> None:
        self.folder, self.limit, self._shape = folder, limit, shape
        self.counts: Counter[str] = Counter()
        _claim(folder, shape.mark)
        self.nbytes = self.measure()

    # ------------------------------------------------------------------ reading

    def names(self, chunk: str) -> list[str]:
        """Variants of a chunk."""
        try:
            found = os.listdir(self._home(chunk))
        except FileNotFoundError:
            return []
        except OSError:
            self.counts["read_failures"] += 1
            return []
        return sorted(name.removesuffix(SUFFIX) for name in found if name.endswith(SUFFIX))

    def facts(self, chunk: str, name: str) -> VariantFacts | None:
        """What the header of a file says; None for a file that is gone or bad, which is removed."""
        return self._guarded(chunk, name, lambda path: header(path, self._shape.mark, chunk))

    def read(self, chunk: str, name: str) -> ChunkVariant | None:
        """A variant; None for a file that is gone or bad, which is removed."""
        found = self._guarded(chunk, name, lambda path: self._variant(path, chunk))
        if found is not None:
            try:
                os.utime(self._path(chunk, name))
            except OSError:
                self.counts["read_failures"] += 1
        return found

    def _guarded(self, chunk: str, name: str, read: Callable[[Path], T]) -> T | None:
        """What `read` finds in a file; None where it is gone or bad, and then counted."""
        path = self._path(chunk, name)
        try:
            return read(path)
        except ForeignFileError:
            self.counts["foreign"] += 1
        except TornFileError:
            self.counts["torn"] += 1
        except OSError:
            self.counts["read_failures"] += 1
            return None
        self.remove(chunk, name)
        return None

    def _variant(self, path: Path, chunk: str) -> ChunkVariant:
        """
        Raises:
            TornFileError, ForeignFileError: see there. OSError: it cannot be read.
        """
        facts, tensors = content(path, self._shape.mark, chunk)
        n = len(self._shape.layers)
        try:
            found = ChunkVariant(
                facts, tensors["scores"], tuple(tensors[f"keys.{i}"] for i in range(n)),
                tuple(tensors[f"values.{i}"] for i in range(n)),
            )  # fmt: skip
        except KeyError as error:
            raise ForeignFileError(f"{path.name} lacks {error.args[0]}") from None
        if not self._shape.fits(found):
            raise ForeignFileError(f"{path.name} holds tensors of other shapes or another dtype than this model's")
        return found

    # ------------------------------------------------------------------ writing

    def write(self, variant: ChunkVariant) -> bool:
        """Write a variant; False where it cannot be written, and then nothing is left of it."""
        facts = variant.facts
        data = _serialized(variant, self._shape.mark)
        if len(data) > self.limit:
            return False
        path = self._path(facts.chunk, facts.name)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            publish(write_part(path, data), path)
        except OSError:
            self.counts["write_failures"] += 1
            return False
        self.nbytes += len(data)
        if self.nbytes > self.limit:
            self._make_room(path)
        return True

    def remove(self, chunk: str, name: str) -> None:
        """Remove a variant's file; one that is gone is no error."""
        self.nbytes -= remove_file(self._path(chunk, name))
        self.counts["removed"] += 1

    def _make_room(self, newest: Path) -> None:
        """Remove the longest unused files, all processes' alike, until the rest fits."""
        files = sorted(self._stats(), key=lambda one: one[1])
        self.nbytes = sum(size for _, _, size in files)
        for path, _, size in files:
            if self.nbytes <= self.limit:
                return
            if path != newest:
                remove_file(path)
                self.counts["evicted"] += 1
                self.nbytes -= size

    # ------------------------------------------------------------------ the folder

    def measure(self) -> int:
        """Bytes of all files; left-overs of processes that were killed are removed."""
        for path in self._all(PART):
            try:
                if time.time() - path.stat().st_mtime > LEFT_OVER_S:
                    remove_file(path)
            except OSError:
                self.counts["read_failures"] += 1
        return sum(size for _, _, size in self._stats())

    def _stats(self) -> Iterator[tuple[Path, float, int]]:
        for path in self._all(SUFFIX):
            try:
                found = path.stat()
            except OSError:  # another process has removed it
                continue
            yield path, found.st_mtime, found.st_size

    def _all(self, suffix: str) -> list[Path]:
        try:
            return variant_files(self.folder, suffix)
        except OSError:
            self.counts["read_failures"] += 1
            return []

    def _home(self, chunk: str) -> Path:
        return self.folder / chunk[:2] / chunk

    def _path(self, chunk: str, name: str) -> Path:
        return self._home(chunk) / f"{name}{SUFFIX}"


def variant_files(folder: Path, suffix: str = SUFFIX) -> list[Path]:
    """The files of a store.

    Raises:
        OSError: the folder cannot be read.
    """
    return [path for path in folder.glob("??/*/*") if path.name.endswith(suffix)]


def mark_of(folder: Path) -> str | None:
    """The mark of the model that a folder is of; None where it says none.

    Raises:
        OptionError: it cannot be read.
    """
    try:
        return str(json.loads((folder / _NAME).read_text(encoding="utf-8"))["mark"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):  # new or torn: its files have marks of their own
        return None
    except OSError as error:
        raise OptionError(f"{str(folder)!r} cannot be read ({error}); name another folder") from error


def _claim(folder: Path, mark: str) -> None:
    """Let a folder be of one model.

    Raises:
        OptionError: it is of another model, or cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        found = mark_of(folder)
        if found is None:
            about = json.dumps({"format": FORMAT, "mark": mark}).encode()
            publish(write_part(folder / _NAME, about), folder / _NAME)
            return
    except OSError as error:
        raise OptionError(f"chunks cannot be stored in {str(folder)!r} ({error}); name another folder") from error
    if found != mark:
        raise OptionError(
            f"{str(folder)!r} holds chunks of another model, dtype or format of weights; name another folder, or "
            "empty it with `millpond chunks rm`"
        )


def _serialized(variant: ChunkVariant, mark: str) -> bytes:
    tensors = {"scores": variant.scores}
    for kind in ("keys", "values"):
        tensors |= {f"{kind}.{i}": t for i, t in enumerate(getattr(variant, kind))}
    tensors = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    sums = {name: _checksum(name, t) for name, t in tensors.items()}
    about = json.dumps({"format": FORMAT, "mark": mark, "facts": asdict(variant.facts), "tensors": sums})
    return save(tensors, {"about": about, "seal": _seal(about)})


def header(path: Path, mark: str, chunk: str) -> VariantFacts:
    """What the header of a file says.

    Raises:
        TornFileError: it is not as it was written. ForeignFileError: of another model or chunk. OSError: it is gone.
    """
    with path.open("rb") as file:
        first = file.read(8)
        return _facts(_parse(first + file.read(min(int.from_bytes(first, "little"), MOST_HEADER))), mark, chunk)


def content(path: Path, mark: str, chunk: str) -> tuple[VariantFacts, dict[str, Tensor]]:
    """What a file says and its tensors, verified. The file is read whole, so that one that is cut later harms nothing.

    Raises:
        TornFileError, ForeignFileError, OSError: as `header`.
    """
    data = path.read_bytes()
    about = _parse(data)
    facts = _facts(about, mark, chunk)
    try:
        tensors = load(data)
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise TornFileError(f"{path.name} cannot be read: {error}") from error
    if set(tensors) != set(about["tensors"]):
        raise TornFileError(f"{path.name} holds other tensors than it says")
    for name, tensor in tensors.items():
        if _checksum(name, tensor) != about["tensors"][name]:
            raise TornFileError(f"{path.name}: {name} is not as it was written")
    return facts, tensors


def _facts(about: dict[str, Any], mark: str, chunk: str) -> VariantFacts:
    """
    Raises:
        ForeignFileError: of another model or chunk.
    """
    if about.get("format") != FORMAT or about.get("mark") != mark:
        raise ForeignFileError("a file of another model or format")
    given = dict(about["facts"])
    given |= {name: tuple(given[name]) for name in ("before", "received")}
    facts = VariantFacts(**given)
    if facts.chunk != chunk:
        raise ForeignFileError("a file of another chunk")
    return facts


def _parse(data: bytes) -> dict[str, Any]:
    """What is said in the header of a file that begins with `data`.

    Raises:
        TornFileError: it is not as it was written. ForeignFileError: it is no file of a chunk store.
    """
    end = 8 + int.from_bytes(data[:8], "little")
    if len(data) < 8 or not 8 < end <= min(len(data), 8 + MOST_HEADER):
        raise TornFileError("the file is cut")
    try:
        metadata = json.loads(data[8:end])["__metadata__"]
        about, seal = metadata["about"], metadata["seal"]
        intact = _seal(about) == seal
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TornFileError(f"its header cannot be read: {error}") from error
    if not intact:
        raise TornFileError("its header is not as it was written")
    try:
        found: dict[str, Any] = json.loads(about)
        known = {"format", "mark", "facts", "tensors"} <= found.keys()
    except (ValueError, AttributeError) as error:
        raise ForeignFileError(f"its header says nothing of a chunk: {error}") from error
    if not known:
        raise ForeignFileError("its header says nothing of a chunk")
    return found


def _seal(about: str) -> str:
    return hashlib.blake2b(about.encode(), digest_size=16).hexdigest()


def _checksum(name: str, tensor: Tensor) -> str:
    digest = hashlib.blake2b(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode(), digest_size=16)
    digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
