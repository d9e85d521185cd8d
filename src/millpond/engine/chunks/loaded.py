"""Sources of stored chunks for a prompt: the store's tiers, or chunks that were loaded before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from millpond.cache.chunks.store import ChunkStore
from millpond.cache.chunks.tiers import ChunkUse, VariantKey
from millpond.cache.chunks.variant import StoredVariant, VariantFacts


class ChunkSource(Protocol):
    """Source of the variants of a prompt's chunks.

    Attributes:
        request: Number of the prompt, for the store's paging rules.
    """

    request: int

    def find(self, chunk: str) -> list[VariantFacts]:
        """Return the variants of a chunk."""
        ...

    def take(self, facts: VariantFacts, share: float, use: ChunkUse) -> StoredVariant | None:
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

    def take(self, facts: VariantFacts, share: float, use: ChunkUse) -> StoredVariant | None:
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
        self._variants: dict[VariantKey, StoredVariant] = {}
        self.nbytes = 0
        self.on_release: Callable[[], None] | None = None

    def find(self, chunk: str) -> list[VariantFacts]:
        """Return the variants of a chunk."""
        by_name = {facts.name: facts for facts in self._store.find_held(chunk)}
        by_name |= {
            variant.facts.name: variant.facts for variant in self._variants.values() if variant.facts.chunk == chunk
        }
        return list(by_name.values())

    def take(self, facts: VariantFacts, share: float, use: ChunkUse) -> StoredVariant | None:
        """Return one of the variants, see `ChunkSource`."""
        variant = self._variants.get(VariantKey(facts.chunk, facts.name))
        return self._store.take_held(facts, share, use) if variant is None else variant

    def missed(self) -> None:
        """Count a miss, see `ChunkSource`."""
        self._store.missed()

    def add(self, variant: StoredVariant) -> None:
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


class LoadingSource:
    """Both tiers of a store, in the thread that loads; records the taken variants.

    Args:
        store: The store.
        loaded: Variants of the request.
    """

    def __init__(self, store: ChunkStore, loaded: LoadedChunks) -> None:
        self._store, self._loaded, self.request = store, loaded, loaded.request

    def find(self, chunk: str) -> list[VariantFacts]:
        """Return the variants of a chunk."""
        return self._store.find(chunk)

    def take(self, facts: VariantFacts, share: float, use: ChunkUse) -> StoredVariant | None:
        """Return one of the variants and record it, see `ChunkSource`."""
        variant = self._store.take(facts, share, use)
        if variant is not None:
            self._loaded.add(variant)
        return variant

    def missed(self) -> None:
        """Do nothing: a miss is counted when the prompt begins.

        Another request may have stored the chunk by then.
        """
