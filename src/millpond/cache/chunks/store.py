"""Chunk store: variants of text chunks in memory, and in files for what does not fit there or shall stay."""

from __future__ import annotations

import os
from collections import Counter, OrderedDict
from dataclasses import dataclass, replace
from pathlib import Path
from threading import RLock

from millpond.budget import parse_bytes
from millpond.cache.chunks.files import ChunkFiles
from millpond.cache.chunks.rest_format import check_rest
from millpond.cache.chunks.shape import StoredShape
from millpond.cache.chunks.variant import ChunkVariant, StoredVariant, VariantFacts
from millpond.errors import NumericsError, OptionError

#: Least CFO that a use counts with, so that an exact variant is not worth infinitely much.
LEAST_SHARE = 0.05

_Place = tuple[str, str]  # chunk and name of a variant


@dataclass(frozen=True, slots=True)
class ChunkStoreStats:
    """A chunk store at one moment; counters count from its opening.

    Attributes:
        memory_bytes, disk_bytes: of the variants in memory and of the files.
        memory_hits, disk_hits: counters of variants that prompts took from there. misses: of chunks that had none.
        stored: counter of variants that were computed and kept.
        memory_evicted, disk_evicted: counters of variants that left, for room.
        torn, foreign: counters of files that were cut or changed, or of another model; they were removed.
        write_failures, read_failures: counters of files that the disk did not take or give.
        not_finite: counter of variants with numbers that the format of the store cannot hold; they were not kept.
    """

    memory_bytes: int
    disk_bytes: int
    memory_hits: int
    disk_hits: int
    misses: int
    stored: int
    memory_evicted: int
    disk_evicted: int
    torn: int
    foreign: int
    write_failures: int
    read_failures: int
    not_finite: int = 0


class ChunkStore:
    """Keys and values of text chunks, which prompts use wherever they hold these chunks.

    It belongs to one model from the first engine that takes it on. Several engines and processes may share a folder. A
    file that is cut, changed or foreign is counted and removed, and its chunk is computed.

    Args:
        folder: of the files, made where it does not exist; None: in memory alone.
        memory: most bytes in memory, such as "1GiB". disk: most bytes of files.
        variants: of one chunk that are kept, computed after different texts.
        alpha: factor on the share of a chunk that is computed again with recompute="auto" (CFO), above 0. CCI is close
            to 1 in the models that were measured, so that 0.17 gives about 15 % of a chunk whose old context has
            nothing in common with the new one; the value of the paper is not known.
        dtype: of keys and values at rest, in memory and in files: "auto" (those of the model), "float32", "bf16",
            "int8" or "int4". One that is narrower than the model's makes every reuse an approximation.

    Raises:
        OptionError: a value out of range.

    Example:
        >>> ChunkStore(None, memory="64MiB").stats().stored
        0
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None,
        *,
        memory: str | int = "1GiB",
        disk: str | int = "20GiB",
        variants: int = 4,
        alpha: float = 0.17,
        dtype: str = "auto",
    ) -> None:
        self.folder = None if folder is None else Path(folder)
        self.memory, self.disk = parse_bytes(memory), parse_bytes(disk)
        if variants < 1:
            raise OptionError(f"variants={variants} of a chunk: must be at least 1")
        if not alpha > 0:
            raise OptionError(f"alpha={alpha} must be above 0")
        self.variants, self.alpha, self.dtype = variants, alpha, check_rest(dtype)
        self._counts: Counter[str] = Counter()
        self._held: OrderedDict[_Place, StoredVariant] = OrderedDict()  # the longest unused first
        self._held_bytes = 0
        self._worth: Counter[_Place] = Counter()
        self._shape: StoredShape | None = None
        self._files: ChunkFiles | None = None
        self._lock = RLock()

    def bind(self, shape: StoredShape) -> None:
        """Be the store of a model, in the format of this store.

        Raises:
            OptionError: it is another model's.
        """
        shape = replace(shape, rest=self.dtype)
        with self._lock:
            if self._shape is not None and self._shape != shape:
                raise OptionError(
                    "this ChunkStore is in use with another model, dtype or format of weights; make one for each"
                )
            if self._shape is None:
                self._files = None if self.folder is None else ChunkFiles(self.folder, self.disk, shape)
                self._shape = shape

    @property
    def exact(self) -> bool:
        """Whether chunks are kept bit for bit."""
        assert self._shape is not None, "a store is bound before it is used"
        return self._shape.format.exact

    def check_size(self, n_tokens: int) -> None:
        """
        Raises:
            OptionError: a chunk of `n_tokens` fits neither in memory nor in the files.
        """
        assert self._shape is not None, "a store is bound before it is used"
        need, most = self._shape.nbytes(n_tokens), max(self.memory, 0 if self._files is None else self.disk)
        if need > most:
            raise OptionError(
                f"a chunk of {n_tokens} tokens takes {need:,} bytes and the chunk store holds {most:,}; raise "
                "memory= or disk=, or cut the chunk"
            )

    # ------------------------------------------------------------------ prompts

    def find(self, chunk: str) -> list[VariantFacts]:
        """The variants of a chunk, in memory and on the disk; nothing of them is read but what they are."""
        with self._lock:
            found = {name: held.facts for (key, name), held in self._held.items() if key == chunk}
            for name in [] if self._files is None else self._files.names(chunk):
                if name not in found and (facts := self._known(chunk, name)) is not None:
                    found[name] = facts
            return list(found.values())

    def _known(self, chunk: str, name: str) -> VariantFacts | None:
        assert self._files is not None, "of a file"
        return self._files.facts(chunk, name)

    def take(self, facts: VariantFacts, share: float) -> StoredVariant | None:
        """A variant for a prompt that computes `share` of it again; None where its file is gone or bad."""
        place = facts.chunk, facts.name
        with self._lock:
            found = self._held.get(place)
            if found is not None:
                self._held.move_to_end(place)
                self._counts["memory_hits"] += 1
            elif self._files is not None and (found := self._files.read(*place)) is not None:
                self._counts["disk_hits"] += 1
                self._hold(found)
            if found is not None:
                self._worth[place] += 1 / max(share, LEAST_SHARE)  # type: ignore[assignment]
            return found

    def missed(self) -> None:
        """Count a chunk without a variant."""
        with self._lock:
            self._counts["misses"] += 1

    def put(self, variant: ChunkVariant, *, private: bool = False) -> None:
        """Keep a variant; where its chunk has as many as are kept, the least useful one goes.

        private: in memory alone.
        """
        facts = variant.facts
        assert self._shape is not None, "a store is bound before it is used"
        try:
            stored = variant.stored(self._shape)
        except NumericsError:
            with self._lock:
                self._counts["not_finite"] += 1
            return
        with self._lock:
            known = self.find(facts.chunk)
            if any(one.prefix == facts.prefix and one.exact >= facts.exact for one in known):
                return
            while len(known) >= self.variants:
                least = min(known, key=lambda one: self._worth[one.chunk, one.name])
                known.remove(least)
                self._remove(least.chunk, least.name)
            self._counts["stored"] += 1
            self._hold(stored)
            if self._files is not None and not private:
                self._files.write(stored)

    def _hold(self, variant: StoredVariant) -> None:
        """Hold a variant in memory, in place of the longest unused ones."""
        if variant.nbytes > self.memory:
            return
        place = variant.facts.chunk, variant.facts.name
        self._drop(place)
        while self._held_bytes + variant.nbytes > self.memory:
            self._drop(next(iter(self._held)))
            self._counts["memory_evicted"] += 1
        self._held[place] = variant
        self._held_bytes += variant.nbytes

    def _drop(self, place: _Place) -> None:
        gone = self._held.pop(place, None)
        self._held_bytes -= 0 if gone is None else gone.nbytes

    def _remove(self, chunk: str, name: str) -> None:
        self._drop((chunk, name))
        self._worth.pop((chunk, name), None)
        if self._files is not None:
            self._files.remove(chunk, name)

    # ------------------------------------------------------------------ figures

    def stats(self) -> ChunkStoreStats:
        """Bytes and counters; from any thread."""
        with self._lock:
            files = Counter() if self._files is None else self._files.counts
            counts = self._counts
            return ChunkStoreStats(
                memory_bytes=self._held_bytes, disk_bytes=0 if self._files is None else self._files.nbytes,
                memory_hits=counts["memory_hits"], disk_hits=counts["disk_hits"], misses=counts["misses"],
                stored=counts["stored"], memory_evicted=counts["memory_evicted"], disk_evicted=files["evicted"],
                torn=files["torn"], foreign=files["foreign"], write_failures=files["write_failures"],
                read_failures=files["read_failures"], not_finite=counts["not_finite"],
            )  # fmt: skip
