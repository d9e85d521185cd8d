"""Chunk store: variants of text chunks in memory, and in files for what does not fit there or shall stay."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from threading import RLock

from millpond.budget import parse_bytes
from millpond.cache.chunks.files import ChunkFiles
from millpond.cache.chunks.tiers import ChunkUse, MemoryTier, Place
from millpond.cache.chunks.variant import ChunkVariant, StoredShape, StoredVariant, VariantFacts, check_rest
from millpond.cache.paging.choose import rule_named
from millpond.cache.paging.rule import PagingRule
from millpond.errors import NumericsError, OptionError

#: Least CFO that a use counts with, so that an exact variant is not worth infinitely much.
LEAST_SHARE = 0.05


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
        load_failures: counter of requests whose chunks could not be loaded for another reason; they were computed.
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
    load_failures: int
    not_finite: int


class ChunkStore:
    """Keys and values of text chunks, which prompts use wherever they hold these chunks.

    It belongs to one model from the first engine that takes it on. Several engines and processes may share a folder. A
    file that is cut, changed or foreign is counted and removed, and its chunk is computed.

    Args:
        folder: of the files, made where it does not exist; None: in memory alone.
        memory: most bytes in memory, such as "1GiB". disk: most bytes of files.
        variants: of one chunk that are kept at most. Another one than the first is computed only where a prompt's CFO
            reaches 1, which takes an `alpha` near 1 or above.
        alpha: factor on the share of a chunk that is computed again with recompute="auto" (CFO), above 0. CCI is below
            1, so that 0.17 gives at most 17 % of a chunk; the value of the paper is not known.
        dtype: of keys and values at rest, in memory and in files: "auto" (those of the model), "float32", "bf16",
            "int8" or "int4". One that is narrower than the model's makes every reuse an approximation.
        rule: which variants leave a full tier: a paging rule ("lru", "learned"), as of `prefix_cache`. Those that
            prompts use stay. pager: file of the predictor of a rule that has one.
        loading: most bytes of files that an engine holds for requests that wait or read their prompts. One request
            whose chunks take more is loaded alone.

    Raises:
        OptionError: a value out of range, or an unknown rule. DataError: a pager that cannot be read.

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
        rule: str = "lru",
        pager: str | os.PathLike[str] | None = None,
        loading: str | int = "512MiB",
    ) -> None:
        self.folder = None if folder is None else Path(folder)
        self.memory, self.disk, self.loading = parse_bytes(memory), parse_bytes(disk), parse_bytes(loading)
        if variants < 1:
            raise OptionError(f"variants={variants} of a chunk: must be at least 1")
        if not alpha > 0:
            raise OptionError(f"alpha={alpha} must be above 0")
        self.variants, self.alpha, self.dtype = variants, alpha, check_rest(dtype)
        self.rule, self._pager = rule, pager
        self._counts: Counter[str] = Counter()
        self._memory = MemoryTier(self.memory, self._new_rule())
        self._worth: dict[Place, float] = {}
        self._shape: StoredShape | None = None
        self._files: ChunkFiles | None = None
        self._requests = 0
        self._lock = RLock()

    def _new_rule(self) -> PagingRule:
        """
        Raises:
            OptionError, DataError: see `rule_named`.
        """
        found = rule_named(self.rule, self._pager)
        assert found is not None, "a name is a rule"
        return found

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
                if self.folder is not None:
                    self._files = ChunkFiles(self.folder, self.disk, shape, self._new_rule(), self.new_request)
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
        need, most = self.size_of(n_tokens), max(self.memory, 0 if self._files is None else self.disk)
        if need > most:
            raise OptionError(
                f"a chunk of {n_tokens} tokens takes {need:,} bytes and the chunk store holds {most:,}; raise "
                "memory= or disk=, or cut the chunk"
            )

    # ------------------------------------------------------------------ prompts

    def new_request(self) -> int:
        """A number for a prompt that uses chunks."""
        with self._lock:
            self._requests += 1
            return self._requests

    def find(self, chunk: str) -> list[VariantFacts]:
        """The variants of a chunk, in memory and on the disk; of files only the headers are read."""
        found = {facts.name: facts for facts in self.find_held(chunk)}
        for name in [] if self._files is None else self._files.names(chunk):
            if name not in found and (facts := self._files_facts(Place(chunk, name))) is not None:
                found[name] = facts
        return list(found.values())

    def find_held(self, chunk: str) -> list[VariantFacts]:
        """The variants of a chunk in memory."""
        with self._lock:
            return self._memory.facts(chunk)

    def _files_facts(self, place: Place) -> VariantFacts | None:
        assert self._files is not None, "of a file"
        return self._files.facts(place)

    def take(self, facts: VariantFacts, share: float, use: ChunkUse | None = None) -> StoredVariant | None:
        """A variant for a prompt that computes `share` of it again; None where its file is gone or bad.

        While a file is read other threads use the store.
        """
        use = use or ChunkUse(self.new_request())
        found = self.take_held(facts, share, use)
        if found is not None or self._files is None:
            return found
        found = self._files.read(Place(facts.chunk, facts.name), use)
        if found is not None:
            with self._lock:
                self._counts["disk_hits"] += 1
                self._memory.hold(found, use)
                self._note_worth(facts, share)
        return found

    def take_held(self, facts: VariantFacts, share: float, use: ChunkUse) -> StoredVariant | None:
        """See `take`; None where it is not in memory."""
        with self._lock:
            found = self._memory.take(Place(facts.chunk, facts.name), use)
            if found is not None:
                self._counts["memory_hits"] += 1
                self._note_worth(facts, share)
            return found

    def _note_worth(self, facts: VariantFacts, share: float) -> None:
        place = Place(facts.chunk, facts.name)
        self._worth[place] = self._worth.get(place, 0) + 1 / max(share, LEAST_SHARE)

    def pin(self, facts: VariantFacts) -> None:
        """A variant is in use: it leaves neither tier for room until it is unpinned as often."""
        place = Place(facts.chunk, facts.name)
        with self._lock:
            self._memory.rule.pin(place)
        if self._files is not None:
            self._files.pin(place)

    def unpin(self, facts: VariantFacts) -> None:
        """See `pin`."""
        place = Place(facts.chunk, facts.name)
        with self._lock:
            self._memory.rule.unpin(place)
        if self._files is not None:
            self._files.unpin(place)

    def size_of(self, n_tokens: int) -> int:
        """Bytes of a variant of so long a chunk."""
        assert self._shape is not None, "a store is bound before it is used"
        return self._shape.nbytes(n_tokens)

    def load_failed(self) -> None:
        """Count chunks of a request that could not be loaded for another reason than their files."""
        with self._lock:
            self._counts["load_failures"] += 1

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
        known, use = self.find(facts.chunk), ChunkUse(self.new_request())
        if any(one.prefix == facts.prefix and one.exact >= facts.exact for one in known):
            return
        while len(known) >= self.variants:
            least = min(known, key=lambda one: self._worth.get(Place(one.chunk, one.name), 0))
            known.remove(least)
            self._remove(Place(least.chunk, least.name))
        with self._lock:
            self._counts["stored"] += 1
            self._memory.hold(stored, use)
        if self._files is not None and not private:
            self._files.write(stored, use)

    def _remove(self, place: Place) -> None:
        with self._lock:
            self._memory.drop(place)
            self._worth.pop(place, None)
        if self._files is not None:
            self._files.remove(place)

    # ------------------------------------------------------------------ figures

    def stats(self) -> ChunkStoreStats:
        """Bytes and counters; from any thread."""
        with self._lock:
            files = Counter() if self._files is None else self._files.counts
            counts = self._counts
            return ChunkStoreStats(
                memory_bytes=self._memory.nbytes,
                disk_bytes=0 if self._files is None else self._files.nbytes,
                memory_evicted=self._memory.evicted,
                disk_evicted=files["evicted"],
                **{name: files[name] for name in ("torn", "foreign", "write_failures", "read_failures")},
                **{name: counts[name] for name in ("memory_hits", "disk_hits", "misses", "stored")},
                **{name: counts[name] for name in ("load_failures", "not_finite")},
            )
