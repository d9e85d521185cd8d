"""Chunk store: variants of text chunks in memory, and in files for those that do not fit there or shall stay."""

from __future__ import annotations

import math
import os
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from threading import RLock

from millpond.budget import parse_bytes
from millpond.cache.chunks.coded import ChunkCodec
from millpond.cache.chunks.files import ChunkFiles
from millpond.cache.chunks.layered import LayeredVariant
from millpond.cache.chunks.tiers import ChunkUse, MemoryTier, VariantKey
from millpond.cache.chunks.variant import ChunkVariant, StoredShape, StoredVariant, VariantFacts, check_rest
from millpond.cache.paging.choose import rule_named
from millpond.cache.paging.rule import PagingRule
from millpond.codec.transform.storage_codec import StorageCodec
from millpond.codec.transform.transform_file import ModelTransform
from millpond.errors import NumericsError, OptionError


@dataclass(frozen=True, slots=True)
class ChunkStoreStats:
    """Bytes and counters of a chunk store; counters count from its opening.

    Attributes:
        memory_bytes: Bytes of the variants in memory.
        disk_bytes: Bytes of the files.
        memory_hits: Counter of variants that prompts took from memory.
        disk_hits: Counter of variants that prompts took from files.
        misses: Counter of chunks that had no variant.
        stored: Counter of variants that were computed and kept.
        memory_evicted: Counter of variants that were evicted from memory.
        disk_evicted: Counter of files that were evicted.
        torn: Counter of files that were cut or changed; they were removed.
        foreign: Counter of files of another model; they were removed.
        write_failures: Counter of files that could not be written.
        read_failures: Counter of files that could not be read.
        load_failures: Counter of requests whose chunks could not be loaded for another reason; they were computed.
        load_timeouts: Counter of requests whose chunks were computed, since nothing came from the disk for as long as
            `load_timeout_s`.
        begun_again: Counter of prompts that began again, since a pass came to a layer of a chunk that was not in.
        not_finite: Counter of variants with numbers that the format of the store cannot hold; they were not kept.
        left_out: Counter of tokens that layers left out since their chunk was out of focus, once for each layer.
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
    load_timeouts: int
    begun_again: int
    not_finite: int
    left_out: int


class ChunkStore:
    """Keys and values of text chunks, for all prompts that contain these chunks.

    A store belongs to one model from the first engine that uses it. Several engines and processes may share a folder. A
    file that is cut, changed or foreign is counted and removed, and its chunk is computed.

    Args:
        folder: Folder of the files, made if it does not exist; None for memory alone.
        memory: Most bytes in memory, such as "1GiB".
        disk: Most bytes of files.
        variants: Most variants of one chunk that are kept, each for another context.
        keep_above: CFO above which a chunk that recompute="auto" has computed in part is kept as a further variant,
            while there are fewer than `variants` and room that nothing else takes; from 0 on. 1 keeps none but those
            that are computed in full.
        alpha: Factor on the share of a chunk that is computed again with recompute="auto" (CFO), above 0. CCI is below
            1, so that 0.17 gives at most 17 % of a chunk; the value of the paper is not known.
        focus: Layers for which the chunks that the question attends to must stay the same; tokens of other chunks are
            not computed again in deeper layers then. 0: all are, in all layers.
        coverage: Share of the question's attention to chunks that those in focus have, above 0, at most 1: the fewest
            chunks that have more of it, summed over the layers so far.
        dtype: Dtype of keys and values at rest, in memory and in files: "auto" (that of the model), "float32", "bf16",
            "int8" or "int4", or a storage codec such as "transform:1.5", whose transform file the engine has as
            `calibration` (with `storage_codec`). One that is narrower than the model's makes every reuse an
            approximation.
        rule: Paging rule ("lru", "craft", "learned") that chooses the variants to evict from a full tier, as of
            `prefix_cache`. Variants in use by prompts stay. "craft" evicts the one with the least f, to which each use
            adds 1 / CFO.
        pager: File of the predictor of a rule that has one.
        loading: Most bytes of files that an engine holds for requests that wait or read their prompts. One request
            whose chunks take more is loaded alone.
        load_timeout_s: Seconds for which nothing may come from the disk while files are read, above 0. Then requests
            that wait for chunks compute them, and files are left alone until the disk gives something again.

    Raises:
        OptionError: a value out of range, or an unknown rule.
        DataError: a pager that cannot be read.

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
        keep_above: float = 0.05,
        alpha: float = 0.17,
        focus: int = 0,
        coverage: float = 0.5,
        dtype: str = "auto",
        rule: str = "lru",
        pager: str | os.PathLike[str] | None = None,
        loading: str | int = "512MiB",
        load_timeout_s: float = 10.0,
    ) -> None:
        self.folder = None if folder is None else Path(folder)
        self.memory, self.disk, self.loading = parse_bytes(memory), parse_bytes(disk), parse_bytes(loading)
        if variants < 1:
            raise OptionError(f"variants={variants} of a chunk: must be at least 1")
        if not 0 < alpha < math.inf:
            raise OptionError(f"alpha={alpha} must be a number above 0")
        if not 0 <= keep_above <= 1:
            raise OptionError(f"keep_above={keep_above} must be a CFO, from 0 to 1; 1 keeps no chunk computed in part")
        self.variants, self.keep_above, self.alpha, self.dtype = variants, keep_above, alpha, check_rest(dtype)
        if focus < 0:
            raise OptionError(f"focus={focus} must be a number of layers, or 0 for none")
        if not 0 < coverage <= 1:
            raise OptionError(f"coverage={coverage} must be a share above 0, at most 1")
        if not load_timeout_s > 0:
            raise OptionError(
                f"load_timeout_s={load_timeout_s} must be a number of seconds above 0; inf waits for ever"
            )
        self.focus, self.coverage, self.load_timeout_s = focus, coverage, load_timeout_s
        self.files_hang = False
        self.rule, self._pager = rule, pager
        self._counts: Counter[str] = Counter()
        self._memory = MemoryTier(self.memory, self._new_rule())
        self._worth: dict[VariantKey, float] = {}
        self._shape: StoredShape | None = None
        self._files: ChunkFiles | None = None
        self._requests = 0
        self._lock = RLock()

    def _new_rule(self) -> PagingRule:
        """Return a new paging rule for a tier.

        Raises:
            OptionError, DataError: see `rule_named`.
        """
        rule = rule_named(self.rule, self._pager)
        assert rule is not None, "a name is a rule"
        return rule

    def bind(self, shape: StoredShape, transform: ModelTransform | None = None) -> None:
        """Bind the store to a model, in the format of this store.

        Args:
            shape: Shape of the model's chunks.
            transform: Its transform, for a storage codec.

        Raises:
            OptionError: it is another model's, or a storage codec has no transform.
        """
        if not isinstance(self.dtype, StorageCodec):
            shape = replace(shape, rest=self.dtype)
        elif transform is None:
            raise OptionError(
                f"ChunkStore(dtype={self.dtype.name!r}) needs the model's transform: give the engine "
                f"storage_codec={self.dtype.name!r} and its file as calibration"
            )
        else:
            shape = replace(shape, codec=ChunkCodec.of(transform, self.dtype))
        with self._lock:
            if self._shape is not None and (self._shape != shape or self._shape.mark != shape.mark):
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
        return self._shape.exact

    def check_size(self, n_tokens: int) -> None:
        """Check that a chunk of `n_tokens` fits in memory or in the files.

        Raises:
            OptionError: it fits in neither.
        """
        assert self._shape is not None, "a store is bound before it is used"
        need, max_bytes = self.size_of(n_tokens), max(self.memory, 0 if self._files is None else self.disk)
        if need > max_bytes:
            raise OptionError(
                f"a chunk of {n_tokens} tokens takes {need:,} bytes and the chunk store holds {max_bytes:,}; raise "
                "memory= or disk=, or cut the chunk"
            )

    # ------------------------------------------------------------------ prompts

    def new_request(self) -> int:
        """Return a number for a prompt that uses chunks."""
        with self._lock:
            self._requests += 1
            return self._requests

    def find(self, chunk: str) -> list[VariantFacts]:
        """Return the facts of a chunk's variants, in memory and on the disk.

        Only the headers of files are read.
        """
        by_name = {facts.name: facts for facts in self.find_held(chunk)}
        for name in [] if self._files is None else self._files.names(chunk):
            if name not in by_name and (facts := self._files_facts(VariantKey(chunk, name))) is not None:
                by_name[name] = facts
        return list(by_name.values())

    def find_held(self, chunk: str) -> list[VariantFacts]:
        """Return the facts of a chunk's variants in memory."""
        with self._lock:
            return self._memory.facts(chunk)

    def _files_facts(self, key: VariantKey) -> VariantFacts | None:
        assert self._files is not None, "of a file"
        return self._files.facts(key)

    def take(self, facts: VariantFacts, share: float, use: ChunkUse | None = None) -> StoredVariant | None:
        """Return a variant for a prompt that computes `share` of it again.

        None if its file is missing or bad. While a file is read other threads use the store.
        """
        use = (use or ChunkUse(self.new_request()))._replace(share=share)
        variant = self.take_held(facts, share, use)
        if variant is not None or self._files is None:
            return variant
        variant = self._files.read(VariantKey(facts.chunk, facts.name), use)
        if variant is not None:
            with self._lock:
                self._counts["disk_hits"] += 1
                self._memory.hold(variant, use)
                self._add_worth(facts, use)
        return variant

    def open_layers(self, facts: VariantFacts, share: float, use: ChunkUse) -> LayeredVariant | None:
        """Return a variant of a file whose layers `read_layer` reads, see `take`."""
        if self._files is None:
            return None
        assert self._shape is not None, "a store is bound before it is used"
        use = use._replace(share=share)
        reader = self._files.open_layers(VariantKey(facts.chunk, facts.name), use)
        if reader is None:
            return None
        with self._lock:
            self._counts["disk_hits"] += 1
            self._add_worth(facts, use)
        return LayeredVariant(reader, self._shape, use)

    def read_layer(self, variant: LayeredVariant, layer: int) -> None:
        """Read the next layer of a variant.

        A bad one is lost with its file; a variant that is whole is held in memory.
        """
        assert self._files is not None, "of a file"
        variant.add(self._files.read_layer(variant.key, variant.reader, layer))
        if variant.is_whole:
            with self._lock:
                self._memory.hold(variant.stored(), variant.use)

    def take_held(self, facts: VariantFacts, share: float, use: ChunkUse) -> StoredVariant | None:
        """See `take`; None if it is not in memory."""
        with self._lock:
            use = use._replace(share=share)
            variant = self._memory.take(VariantKey(facts.chunk, facts.name), use)
            if variant is not None:
                self._counts["memory_hits"] += 1
                self._add_worth(facts, use)
            return variant

    def _add_worth(self, facts: VariantFacts, use: ChunkUse) -> None:
        key = VariantKey(facts.chunk, facts.name)
        self._worth[key] = self._worth.get(key, 0) + use.gain

    def pin(self, facts: VariantFacts) -> None:
        """Keep a variant in use in both tiers until it is unpinned as often."""
        key = VariantKey(facts.chunk, facts.name)
        with self._lock:
            self._memory.rule.pin(key)
        if self._files is not None:
            self._files.pin(key)

    def unpin(self, facts: VariantFacts) -> None:
        """See `pin`."""
        key = VariantKey(facts.chunk, facts.name)
        with self._lock:
            self._memory.rule.unpin(key)
        if self._files is not None:
            self._files.unpin(key)

    def size_of(self, n_tokens: int) -> int:
        """Return the bytes of a variant of a chunk of `n_tokens` tokens."""
        assert self._shape is not None, "a store is bound before it is used"
        return self._shape.nbytes(n_tokens)

    def takes_further(self, share: float, n_variants: int, n_tokens: int, *, private: bool) -> bool:
        """Return whether a chunk that is computed in part is kept as a further variant.

        Args:
            share: CFO of the variant that the rest comes from.
            n_variants: Variants that the chunk has.
            n_tokens: Tokens of the chunk.
            private: Whether it would be kept in memory alone.
        """
        if share <= self.keep_above or n_variants >= self.variants:
            return False
        with self._lock:
            n_free = self._memory.n_free
        if self._files is not None and not private:
            n_free = max(n_free, self._files.n_free)
        return self.size_of(n_tokens) <= n_free

    def load_timed_out(self) -> None:
        """Count a request whose chunks are computed since nothing came from the disk."""
        with self._lock:
            self._counts["load_timeouts"] += 1

    def begun_again(self) -> None:
        """Count a prompt that begins again since a layer of a chunk was not in."""
        with self._lock:
            self._counts["begun_again"] += 1

    def load_failed(self) -> None:
        """Count chunks of a request that could not be loaded for another reason than their files."""
        with self._lock:
            self._counts["load_failures"] += 1

    def left_out(self, n: int) -> None:
        """Count tokens that layers left out, each once for each layer."""
        with self._lock:
            self._counts["left_out"] += n

    def missed(self) -> None:
        """Count a chunk without a variant."""
        with self._lock:
            self._counts["misses"] += 1

    def put(self, variant: ChunkVariant, *, private: bool = False, replaces: bool = True) -> None:
        """Keep a variant.

        Args:
            variant: Variant to keep.
            private: Whether to keep it in memory alone.
            replaces: Whether it takes the place of others: of the least useful one where its chunk has `variants`
                already, and of those that the rule evicts from a full tier; False: it is not kept then.
        """
        facts = variant.facts
        assert self._shape is not None, "a store is bound before it is used"
        try:
            stored = variant.stored(self._shape)
        except NumericsError:
            with self._lock:
                self._counts["not_finite"] += 1
            return
        files = None if private or self.files_hang else self._files
        variants = self.find_held(facts.chunk) if self.files_hang else self.find(facts.chunk)
        use = ChunkUse(self.new_request())
        if any(other.prefix == facts.prefix and other.exact >= facts.exact for other in variants):
            return
        if len(variants) >= self.variants and not replaces:
            return
        while len(variants) >= self.variants:
            least_useful = min(variants, key=lambda other: self._worth.get(VariantKey(other.chunk, other.name), 0))
            variants.remove(least_useful)
            self._remove(VariantKey(least_useful.chunk, least_useful.name))
        with self._lock:
            is_held = self._memory.hold(stored, use, evicts=replaces)
        if files is not None:
            is_held |= files.write(stored, use, evicts=replaces)
        with self._lock:
            self._counts["stored"] += is_held or replaces

    def _remove(self, key: VariantKey) -> None:
        with self._lock:
            self._memory.drop(key)
            self._worth.pop(key, None)
        if self._files is not None and not self.files_hang:
            self._files.remove(key)

    # ------------------------------------------------------------------ figures

    def stats(self) -> ChunkStoreStats:
        """Return bytes and counters; from any thread."""
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
                **{name: counts[name] for name in ("load_failures", "load_timeouts", "begun_again")},
                **{name: counts[name] for name in ("not_finite", "left_out")},
            )
