"""Disk tier of a chunk store: one file per variant, verified at reading, and listed without the model.

A file is safetensors. Its header holds the format, the mark of the model, what is known of the variant, and a checksum
of each tensor, all under a checksum of their own.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import RLock
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from millpond.cache.atomic_files import PART, publish, remove_file, write_part
from millpond.cache.chunks.tiers import ChunkUse, Place, TierRule
from millpond.cache.chunks.variant import StoredShape, StoredVariant, VariantFacts
from millpond.cache.paging.rule import PagingRule
from millpond.errors import DataError, OptionError
from millpond.typed_json import as_type

#: Name of the format of the files, and of the file that names the model of a folder.
FORMAT = "millpond-chunk-1"
#: Longest header that is read, in bytes.
MOST_HEADER = 16 << 20


class TornFileError(DataError):
    """A file that is cut or not as it was written."""


class ForeignFileError(DataError):
    """A file of another model, format or chunk."""


def serialized(variant: StoredVariant, mark: str) -> bytes:
    """The bytes of the file of a variant."""
    tensors = {name: t.contiguous() for name, t in variant.tensors.items()}
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
    """Facts and tensors of a file, verified. The file is read whole, so that one that is cut later harms nothing.

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
    try:
        facts: VariantFacts = as_type(VariantFacts, about["facts"])
    except TypeError as error:
        raise ForeignFileError(f"its header says nothing of a chunk: {error}") from error
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


T = TypeVar("T")

#: Age of unfinished files after which they are left-overs of a process that was killed, in seconds.
LEFT_OVER_S = 3600.0
SUFFIX, _NAME = ".safetensors", "store.json"


class ChunkFiles:
    """The folder of one store; safe for several threads, of which none waits for what another one reads.

    Args:
        folder: is made where it does not exist. limit: most bytes of all files. rule: which files leave for room.
        new_request: numbers for uses by other processes.

    Attributes:
        counts: of torn, foreign, removed and evicted files, of write_failures and read_failures. nbytes: of all files.

    Raises:
        OptionError: the folder holds chunks of another model, or cannot be made.
    """

    def __init__(
        self, folder: Path, limit: int, shape: StoredShape, rule: PagingRule, new_request: Callable[[], int]
    ) -> None:
        self.folder, self.limit, self._shape = folder, limit, shape
        self.counts: Counter[str] = Counter()
        self._lock = RLock()
        self._rule, self._new_request = TierRule(rule), new_request
        self._used: dict[Place, int] = {}  # when a file was used last, in ns as its mtime has it
        _claim(folder, shape.mark)
        self._remove_left_overs()
        self.nbytes = self._look()

    # ------------------------------------------------------------------ reading

    def names(self, chunk: str) -> list[str]:
        """Variants of a chunk."""
        try:
            found = os.listdir(self._home(chunk))
        except FileNotFoundError:
            return []
        except OSError:
            self._count("read_failures")
            return []
        return sorted(name.removesuffix(SUFFIX) for name in found if name.endswith(SUFFIX))

    def facts(self, place: Place) -> VariantFacts | None:
        """What the header of a file says; None for a file that is gone or bad, which is removed."""
        return self._guarded(place, lambda path: header(path, self._shape.mark, place.chunk))

    def read(self, place: Place, use: ChunkUse) -> StoredVariant | None:
        """A variant, for a prompt; None for a file that is gone or bad, which is removed."""
        found = self._guarded(place, lambda path: self._variant(path, place.chunk))
        if found is not None:
            now = time.time_ns()
            try:
                os.utime(self._path(place), ns=(now, now))
            except OSError:
                self._count("read_failures")
            with self._lock:
                self._used[place] = now
                self._rule.use(place, use)
        return found

    def _guarded(self, place: Place, read: Callable[[Path], T]) -> T | None:
        """What `read` finds in a file; None where it is gone or bad, and then counted."""
        try:
            return read(self._path(place))
        except ForeignFileError:
            self._count("foreign")
        except TornFileError:
            self._count("torn")
        except OSError:
            self._count("read_failures")
            return None
        self.remove(place)
        return None

    def _variant(self, path: Path, chunk: str) -> StoredVariant:
        """
        Raises:
            TornFileError, ForeignFileError: see there. OSError: it cannot be read.
        """
        facts, tensors = content(path, self._shape.mark, chunk)
        if not self._shape.fits(facts.n_tokens, tensors):
            raise ForeignFileError(f"{path.name} holds tensors of other shapes or another dtype than this store's")
        return StoredVariant(facts, self._shape, tensors)

    # ------------------------------------------------------------------ writing

    def write(self, variant: StoredVariant, use: ChunkUse) -> bool:
        """Write a variant; False where it cannot be written, and then nothing is left of it."""
        data = serialized(variant, self._shape.mark)
        if len(data) > self.limit:
            return False
        place = Place(variant.facts.chunk, variant.facts.name)
        path = self._path(place)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            publish(write_part(path, data), path)
        except OSError:
            self._count("write_failures")
            return False
        with self._lock:
            self.nbytes += len(data)
            self._used[place] = time.time_ns()
            self._rule.use(place, use)
            if self.nbytes > self.limit:
                self._make_room(place)
        return True

    def remove(self, place: Place) -> None:
        """Remove a variant's file; one that is gone is no error."""
        gone = remove_file(self._path(place))
        with self._lock:
            self.nbytes -= gone
            self.counts["removed"] += 1
            self._forget(place)

    def pin(self, place: Place) -> None:
        """See `TierRule.pin`."""
        with self._lock:
            self._rule.pin(place)

    def unpin(self, place: Place) -> None:
        """See `TierRule.pin`."""
        with self._lock:
            self._rule.unpin(place)

    def _make_room(self, newest: Place) -> None:
        """Remove files in the order of the rule, all processes' alike, until the rest fits; at last the newest."""
        self.nbytes = self._look()
        self._rule.pin(newest)
        while self.nbytes > self.limit and (place := self._rule.victim()) is not None:
            self._evict(place)
        self._rule.unpin(newest)
        if self.nbytes > self.limit:
            self._evict(newest)

    def _evict(self, place: Place) -> None:
        self.nbytes -= remove_file(self._path(place))
        self.counts["evicted"] += 1
        self._forget(place)

    def _forget(self, place: Place) -> None:
        self._rule.drop(place)
        self._used.pop(place, None)

    # ------------------------------------------------------------------ the folder

    def _look(self) -> int:
        """Bytes of all files. The rule sees those that other processes wrote, used and removed."""
        files = sorted(self._stats(), key=lambda one: one[1])
        there = {place for place, _, _ in files}
        for place in self._rule:
            if place not in there:
                self._forget(place)
        for place, used, _ in files:
            if used > self._used.get(place, -1):
                self._used[place] = used
                self._rule.use(place, ChunkUse(self._new_request()))
        return sum(size for _, _, size in files)

    def _remove_left_overs(self) -> None:
        """Remove files that processes had not finished when they were killed."""
        for path in self._all(PART):
            try:
                if time.time() - path.stat().st_mtime > LEFT_OVER_S:
                    remove_file(path)
            except OSError:
                self._count("read_failures")

    def _stats(self) -> Iterator[tuple[Place, int, int]]:
        for path in self._all(SUFFIX):
            try:
                found = path.stat()
            except OSError:  # another process has removed it
                continue
            yield Place(path.parent.name, path.name.removesuffix(SUFFIX)), found.st_mtime_ns, found.st_size

    def _all(self, suffix: str) -> list[Path]:
        try:
            return variant_files(self.folder, suffix)
        except OSError:
            self._count("read_failures")
            return []

    def _count(self, what: str) -> None:
        with self._lock:
            self.counts[what] += 1

    def _home(self, chunk: str) -> Path:
        return self.folder / chunk[:2] / chunk

    def _path(self, place: Place) -> Path:
        return self._home(place.chunk) / f"{place.name}{SUFFIX}"


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
    """Let a folder be of one model and one format.

    Raises:
        OptionError: it is of another model or in another format, or cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        found = mark_of(folder)
        if found is None:
            own = folder / _NAME
            publish(write_part(own, json.dumps({"format": FORMAT, "mark": mark}).encode()), own)
            return
    except OSError as error:
        raise OptionError(f"chunks cannot be stored in {str(folder)!r} ({error}); name another folder") from error
    if found == mark:
        return
    model, _, rest = found.partition("-")
    if model == mark.partition("-")[0]:
        raise OptionError(
            f"{str(folder)!r} holds chunks in another format; open it with dtype={rest or 'auto'!r}, or name another "
            "folder"
        )
    raise OptionError(
        f"{str(folder)!r} holds chunks of another model, dtype or format of weights; name another folder, or empty it "
        "with `millpond chunks rm`"
    )


@dataclass(frozen=True, slots=True)
class StoredFile:
    """One file of a store.

    Attributes:
        size: in bytes. facts: what its header says; None for a file that is bad, and `why`.
    """

    path: Path
    size: int
    facts: VariantFacts | None
    why: str = ""


def list_files(folder: Path, *, verify: bool = False) -> list[StoredFile]:
    """The files of a store, by chunk; with `verify` every tensor is compared with its checksum.

    Raises:
        OptionError: the folder is no chunk store.
    """
    mark = mark_of(folder)
    if mark is None:
        raise OptionError(f"{str(folder)!r} is no chunk store: it has no store.json that names its model")
    return [_look(path, mark, verify) for path in sorted(variant_files(folder))]


def _look(path: Path, mark: str, verify: bool) -> StoredFile:
    chunk, size = path.parent.name, 0
    try:
        size = path.stat().st_size
        facts = content(path, mark, chunk)[0] if verify else header(path, mark, chunk)
    except (DataError, OSError) as error:
        return StoredFile(path, size, None, str(error))
    return StoredFile(path, size, facts)
