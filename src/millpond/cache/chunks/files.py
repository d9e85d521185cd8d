"""Disk tier of a chunk store: one file per variant, verified at reading, and listed without the model."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import RLock
from typing import TypeVar

from torch import Tensor

from millpond.cache.atomic_files import PART, publish, remove_file, write_part
from millpond.cache.chunks.file_format import (
    FORMAT,
    ForeignFileError,
    LayerReader,
    TornFileError,
    content,
    header,
    serialized,
)
from millpond.cache.chunks.tiers import ChunkUse, TierRule, VariantKey
from millpond.cache.chunks.variant import StoredShape, StoredVariant, VariantFacts
from millpond.cache.paging.rule import PagingRule
from millpond.errors import DataError, OptionError

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
            self._note_use(key, use)
        return variant

    def open_layers(self, key: VariantKey, use: ChunkUse) -> LayerReader | None:
        """Return a reader of a variant's layers, for a prompt.

        None for a missing or bad file, which is removed.
        """
        reader = self._guarded(key, lambda path: LayerReader(path, self._shape, key.chunk))
        if reader is not None:
            self._note_use(key, use)
        return reader

    def read_layer(self, key: VariantKey, reader: LayerReader, layer: int) -> dict[str, Tensor] | None:
        """Return the tensors of a layer by name; None for a bad file, which is removed."""
        return self._guarded(key, lambda _: reader.read(layer))

    def _note_use(self, key: VariantKey, use: ChunkUse) -> None:
        now = time.time_ns()
        try:
            os.utime(self._path(key), ns=(now, now))
        except OSError:
            self._count("read_failures")
        with self._lock:
            self._used[key] = now
            self._rule.use(key, use)

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
    folder_format = folder_format.partition("-")[0]  # behind a storage codec its transform
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
