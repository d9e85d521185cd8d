"""Sources of stored chunks for a prompt: the store's tiers, or chunks that were loaded before."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from millpond.cache.chunks.layered import LayeredVariant
from millpond.cache.chunks.store import ChunkStore
from millpond.cache.chunks.tiers import ChunkUse, VariantKey
from millpond.cache.chunks.variant import ReadableVariant, VariantFacts
from millpond.policy.reuse import layers_before_start


class ChunkSource(Protocol):
    """Source of the variants of a prompt's chunks.

    Attributes:
        request: Number of the prompt, for the store's paging rules.
    """

    request: int

    def find(self, chunk: str) -> list[VariantFacts]:
        """Return the variants of a chunk."""
        ...

    def take(self, facts: VariantFacts, share: float, use: ChunkUse) -> ReadableVariant | None:
        """Return one of the variants; None where it is missing or damaged."""
        ...

    def missed(self) -> None:
        """Count a chunk of which no variant could be taken."""
        ...


class StoreSource:
    """Both tiers of a store, in the caller's thread.

    Args:
        store: The store.
    """

    def __init__(self, store: ChunkStore) -> None:
        self._store, self.request = store, store.new_request()

    def find(self, chunk: str) -> list[VariantFacts]:
        """Return the variants of a chunk."""
        return self._store.find(chunk)

    def take(self, facts: VariantFacts, share: float, use: ChunkUse) -> ReadableVariant | None:
        """Return one of the variants, see `ChunkSource`."""
        return self._store.take(facts, share, use)

    def missed(self) -> None:
        """Count a miss, see `ChunkSource`."""
        self._store.missed()


class LoadedChunks:
    """Variants that were read for one request, and those in memory.

    Nothing is read from a disk here. Loaded variants are pinned in the store until they are released.

    Args:
        store: The store.

    Attributes:
        nbytes: Bytes of all loaded variants, wherever else they are held.
    """

    def __init__(self, store: ChunkStore) -> None:
        self._store, self.request = store, store.new_request()
        self._variants: dict[VariantKey, ReadableVariant] = {}
        self.nbytes = 0
        self.on_release: Callable[[], None] | None = None
        self.on_ready: Callable[[], None] | None = None

    def find(self, chunk: str) -> list[VariantFacts]:
        """Return the variants of a chunk."""
        by_name = {facts.name: facts for facts in self._store.find_held(chunk)}
        by_name |= {
            variant.facts.name: variant.facts
            for variant in self._variants.values()
            if variant.facts.chunk == chunk and not is_lost(variant)
        }
        return list(by_name.values())

    def take(self, facts: VariantFacts, share: float, use: ChunkUse) -> ReadableVariant | None:
        """Return one of the variants, see `ChunkSource`."""
        variant = self._variants.get(VariantKey(facts.chunk, facts.name))
        return self._store.take_held(facts, share, use) if variant is None else variant

    def missed(self) -> None:
        """Count a miss, see `ChunkSource`."""
        self._store.missed()

    def add(self, variant: ReadableVariant) -> None:
        """Add a variant; a known one changes nothing."""
        place = VariantKey(variant.facts.chunk, variant.facts.name)
        if place not in self._variants:
            self._store.pin(variant.facts)
            self._variants[place] = variant
            self.nbytes += variant.nbytes

    def release(self) -> None:
        """Release the variants: the request needs them no longer. A second call does nothing."""
        for variant in self._variants.values():
            self._store.unpin(variant.facts)
        self._variants, self.nbytes = {}, 0
        if self.on_release is not None:
            self.on_release()
            self.on_release = None


def is_lost(variant: ReadableVariant) -> bool:
    """Return whether layers of a variant will never be in."""
    return isinstance(variant, LayeredVariant) and variant.is_lost


class LoadingSource:
    """Both tiers of a store, in the thread that loads; records the taken variants.

    Of files it takes all but the layers, which `read_layers` reads.

    Args:
        store: The store.
        loaded: Variants of the request.
    """

    def __init__(self, store: ChunkStore, loaded: LoadedChunks) -> None:
        self._store, self._loaded, self.request = store, loaded, loaded.request
        self._opened: dict[VariantKey, LayeredVariant] = {}

    def find(self, chunk: str) -> list[VariantFacts]:
        """Return the variants of a chunk."""
        return self._store.find(chunk)

    def take(self, facts: VariantFacts, share: float, use: ChunkUse) -> ReadableVariant | None:
        """Return one of the variants and record it, see `ChunkSource`."""
        key = VariantKey(facts.chunk, facts.name)
        variant: ReadableVariant | None = self._opened.get(key) or self._store.take_held(facts, share, use)
        if variant is None and (opened := self._store.open_layers(facts, share, use)) is not None:
            self._opened[key] = variant = opened
        if variant is not None:
            self._loaded.add(variant)
        return variant

    def read_layers(self, n_layers: int, compute_s: float, is_wanted: Callable[[], bool], n_first: int = 1) -> None:
        """Read the layers of the opened files, one layer of all before the next.

        The request may begin once the other layers will be in by the time that it needs them.

        Args:
            n_layers: Layers of the model.
            compute_s: Seconds that the prompt computes a layer; 0 where that is not known.
            is_wanted: Whether to continue, called after each layer of a chunk.
            n_first: Layers that must be in before the request begins.
        """
        began = time.perf_counter()
        for layer in range(n_layers if self._opened else 0):
            for variant in self._opened.values():
                if not variant.is_lost:
                    self._store.read_layer(variant, layer)
                if not is_wanted():
                    return
            load_s = (time.perf_counter() - began) / (layer + 1)
            n_before = max(n_first, layers_before_start(n_layers, compute_s, load_s))
            if layer + 1 >= n_before and self._loaded.on_ready is not None:
                self._loaded.on_ready()

    def close(self) -> None:
        """Close the opened files; layers that are not in are lost."""
        for variant in self._opened.values():
            variant.close()

    def missed(self) -> None:
        """Do nothing: a miss is counted when the prompt begins.

        Another request may have stored the chunk by then.
        """
