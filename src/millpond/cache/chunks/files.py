"""Disk tier of a chunk store: one file per variant, verified at reading, and listed without the model.

A file is safetensors. Its header holds the format, the mark of the model, the facts of the variant, and a checksum
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
from millpond.cache.chunks.tiers import ChunkUse, TierRule, VariantKey
from millpond.cache.chunks.variant import StoredShape, StoredVariant, VariantFacts
from millpond.cache.paging.rule import PagingRule
from millpond.errors import DataError, OptionError
from millpond.typed_json import as_type

#: Name of the format of the files, and of the file that names the model of a folder.
FORMAT = "millpond-chunk-1"
#: Bytes of the longest header that is read.
MAX_HEADER = 16 << 20


class TornFileError(DataError):
    """A file that is cut or not as it was written."""


class ForeignFileError(DataError):
    """A file of another model, format or chunk."""


def serialized(variant: StoredVariant, mark: str) -> bytes:
    """Return the bytes of the file of a variant."""
    tensors = {name: t.contiguous() for name, t in variant.tensors.items()}
    sums = {name: _checksum(name, t) for name, t in tensors.items()}
    about = json.dumps({"format": FORMAT, "mark": mark, "facts": asdict(variant.facts), "tensors": sums})
    return save(tensors, {"about": about, "seal": _seal(about)})


def header(path: Path, mark: str, chunk: str) -> VariantFacts:
    """Return the facts in the header of a file.

    Raises:
        TornFileError: it is not as it was written.
        ForeignFileError: it is of another model or chunk.
        OSError: it is missing.
    """
    with path.open("rb") as file:
        first = file.read(8)
        return _facts(_parse(first + file.read(min(int.from_bytes(first, "little"), MAX_HEADER))), mark, chunk)


def content(path: Path, mark: str, chunk: str) -> tuple[VariantFacts, dict[str, Tensor]]:
    """Return the facts and tensors of a file, verified.

    The file is read at once, so that one that is cut later harms nothing.

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
    """Return the facts of a parsed header.

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
    """Return the content of the header of a file that begins with `data`.

    Raises:
        TornFileError: it is not as it was written.
        ForeignFileError: it is no file of a chunk store.
    """
    end = 8 + int.from_bytes(data[:8], "little")
    if len(data) < 8 or not 8 < end <= min(len(data), 8 + MAX_HEADER):
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
        about_fields: dict[str, Any] = json.loads(about)
        is_complete = {"format", "mark", "facts", "tensors"} <= about_fields.keys()
    except (ValueError, AttributeError) as error:
        raise ForeignFileError(f"its header says nothing of a chunk: {error}") from error
    if not is_complete:
        raise ForeignFileError("its header says nothing of a chunk")
    return about_fields


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
    """Folder of one store, with a file per variant.

    It is safe for several threads, of which none waits for what another one reads.

    Args:
        folder: Path of the folder; it is made if it does not exist.
        limit: Most bytes of all files.
        shape: Shape of the variants.
        rule: Rule that chooses the files to evict.
        new_request: Function that numbers uses by other processes.

    Attributes:
        counts: Counts of torn, foreign, removed and evicted files, of write_failures and read_failures.
        nbytes: Bytes of all files.

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
        self._used: dict[VariantKey, int] = {}  # when a file was used last, in ns as its mtime has it
        _claim(folder, shape.mark)
        self._remove_left_overs()
        self.nbytes = self._look()

    @property
    def n_free(self) -> int:
        """Bytes that nothing takes."""
        return self.limit - self.nbytes

    # ------------------------------------------------------------------ reading

    def names(self, chunk: str) -> list[str]:
        """Return the names of the variants of a chunk."""
        try:
            names = os.listdir(self._home(chunk))
        except FileNotFoundError:
            return []
        except OSError:
            self._count("read_failures")
            return []
        return sorted(name.removesuffix(SUFFIX) for name in names if name.endswith(SUFFIX))

    def facts(self, key: VariantKey) -> VariantFacts | None:
        """Return the facts in a file's header; None for a missing or bad one, which is removed."""
        return self._guarded(key, lambda path: header(path, self._shape.mark, key.chunk))

    def read(self, key: VariantKey, use: ChunkUse) -> StoredVariant | None:
        """Return a variant, for a prompt; None for a missing or bad file, which is removed."""
        variant = self._guarded(key, lambda path: self._variant(path, key.chunk))
        if variant is not None:
            now = time.time_ns()
            try:
                os.utime(self._path(key), ns=(now, now))
            except OSError:
                self._count("read_failures")
            with self._lock:
                self._used[key] = now
                self._rule.use(key, use)
        return variant

    def _guarded(self, key: VariantKey, read: Callable[[Path], T]) -> T | None:
        """Return what `read` returns for a file; None if it is missing or bad, which is counted."""
        try:
            return read(self._path(key))
        except ForeignFileError:
            self._count("foreign")
        except TornFileError:
            self._count("torn")
        except OSError:
            self._count("read_failures")
            return None
        self.remove(key)
        return None

    def _variant(self, path: Path, chunk: str) -> StoredVariant:
        """Read a variant.

        Raises:
            TornFileError, ForeignFileError: see there.
            OSError: it cannot be read.
        """
        facts, tensors = content(path, self._shape.mark, chunk)
        if not self._shape.fits(facts.n_tokens, tensors):
            raise ForeignFileError(f"{path.name} holds tensors of other shapes or another dtype than this store's")
        return StoredVariant(facts, self._shape, tensors)

    # ------------------------------------------------------------------ writing

    def write(self, variant: StoredVariant, use: ChunkUse, evicts: bool = True) -> bool:
        """Write a variant, evicting others for it if `evicts`.

        False if it cannot be written; then nothing of it is left.
        """
        data = serialized(variant, self._shape.mark)
        if len(data) > (self.limit if evicts else self.n_free):
            return False
        key = VariantKey(variant.facts.chunk, variant.facts.name)
        path = self._path(key)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            publish(write_part(path, data), path)
        except OSError:
            self._count("write_failures")
            return False
        with self._lock:
            self.nbytes += len(data)
            self._used[key] = time.time_ns()
            self._rule.use(key, use)
            if self.nbytes > self.limit:
                self._make_room(key)
        return True

    def remove(self, key: VariantKey) -> None:
        """Remove a variant's file; a missing one is no error."""
        freed_bytes = remove_file(self._path(key))
        with self._lock:
            self.nbytes -= freed_bytes
            self.counts["removed"] += 1
            self._forget(key)

    def pin(self, key: VariantKey) -> None:
        """See `TierRule.pin`."""
        with self._lock:
            self._rule.pin(key)

    def unpin(self, key: VariantKey) -> None:
        """See `TierRule.pin`."""
        with self._lock:
            self._rule.unpin(key)

    def _make_room(self, newest: VariantKey) -> None:
        """Remove files of all processes in the order of the rule until the rest fits.

        The newest is removed last.
        """
        self.nbytes = self._look()
        self._rule.pin(newest)
        while self.nbytes > self.limit and (key := self._rule.victim()) is not None:
            self._evict(key)
        self._rule.unpin(newest)
        if self.nbytes > self.limit:
            self._evict(newest)

    def _evict(self, key: VariantKey) -> None:
        self.nbytes -= remove_file(self._path(key))
        self.counts["evicted"] += 1
        self._forget(key)

    def _forget(self, key: VariantKey) -> None:
        self._rule.drop(key)
        self._used.pop(key, None)

    # ------------------------------------------------------------------ the folder

    def _look(self) -> int:
        """Return the bytes of all files, and let the rule follow other processes.

        They may have written, used and removed files.
        """
        files = sorted(self._stats(), key=lambda stat: stat[1])
        present = {key for key, _, _ in files}
        for key in self._rule:
            if key not in present:
                self._forget(key)
        for key, used, _ in files:
            if used > self._used.get(key, -1):
                self._used[key] = used
                self._rule.use(key, ChunkUse(self._new_request()))
        return sum(size for _, _, size in files)

    def _remove_left_overs(self) -> None:
        """Remove files that processes had not finished when they were killed."""
        for path in self._all(PART):
            try:
                if time.time() - path.stat().st_mtime > LEFT_OVER_S:
                    remove_file(path)
            except OSError:
                self._count("read_failures")

    def _stats(self) -> Iterator[tuple[VariantKey, int, int]]:
        for path in self._all(SUFFIX):
            try:
                stat = path.stat()
            except OSError:  # another process has removed it
                continue
            yield VariantKey(path.parent.name, path.name.removesuffix(SUFFIX)), stat.st_mtime_ns, stat.st_size

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

    def _path(self, key: VariantKey) -> Path:
        return self._home(key.chunk) / f"{key.name}{SUFFIX}"


def variant_files(folder: Path, suffix: str = SUFFIX) -> list[Path]:
    """Return the paths of a store's files.

    Raises:
        OSError: the folder cannot be read.
    """
    return [path for path in folder.glob("??/*/*") if path.name.endswith(suffix)]


def mark_of(folder: Path) -> str | None:
    """Return the mark of the model of a folder; None if it names none.

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
    """Mark a folder as that of one model and one format.

    Raises:
        OptionError: it is of another model or in another format, or cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        folder_mark = mark_of(folder)
        if folder_mark is None:
            mark_file = folder / _NAME
            publish(write_part(mark_file, json.dumps({"format": FORMAT, "mark": mark}).encode()), mark_file)
            return
    except OSError as error:
        raise OptionError(f"chunks cannot be stored in {str(folder)!r} ({error}); name another folder") from error
    if folder_mark == mark:
        return
    model, _, folder_format = folder_mark.partition("-")
    if model == mark.partition("-")[0]:
        raise OptionError(
            f"{str(folder)!r} holds chunks in another format; open it with dtype={folder_format or 'auto'!r}, or name "
            "another folder"
        )
    raise OptionError(
        f"{str(folder)!r} holds chunks of another model, dtype or format of weights; name another folder, or empty it "
        "with `millpond chunks rm`"
    )


@dataclass(frozen=True, slots=True)
class StoredFile:
    """File of a store.

    Attributes:
        path: Path of the file.
        size: Size in bytes.
        facts: Facts in its header; None for a bad file, with the reason in `why`.
        why: Reason why it is bad; "" for a good file.
    """

    path: Path
    size: int
    facts: VariantFacts | None
    why: str = ""


def list_files(folder: Path, *, verify: bool = False) -> list[StoredFile]:
    """Return the files of a store, by chunk.

    Args:
        folder: Folder of the store.
        verify: Whether to compare every tensor with its checksum.

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
