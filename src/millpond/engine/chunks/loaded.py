"""Where the prompt of a request finds stored chunks: in the store's tiers, or in what was loaded for it before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from millpond.cache.chunks.store import ChunkStore
from millpond.cache.chunks.tiers import ChunkUse, VariantKey
from millpond.cache.chunks.variant import StoredVariant, VariantFacts


class ChunkSource(Protocol):
    """What a prompt chooses its variants from.

    Attributes:
        request: number of the prompt, for the store's paging rules.
    """

    request: int

    def find(self, chunk: str) -> list[VariantFacts]:
        """The variants of a chunk."""
        ...

    def take(self, facts: VariantFacts, share: float, use: ChunkUse) -> StoredVariant | None:
        """One of them; None where it is gone or bad."""
        ...

    def missed(self) -> None:
        """No variant of a chunk could be taken."""
        ...


class StoreSource:
    """Both tiers of a store, in the caller's thread."""

    def __init__(self, store: ChunkStore) -> None:
        self._store, self.request = store, store.new_request()

    def find(self, chunk: str) -> list[VariantFacts]:
        """See `ChunkSource`."""
        return self._store.find(chunk)

    def take(self, facts: VariantFacts, share: float, use: ChunkUse) -> StoredVariant | None:
        """See `ChunkSource`."""
        return self._store.take(facts, share, use)

    def missed(self) -> None:
        """See `ChunkSource`."""
        self._store.missed()


class LoadedChunks:
    """Variants that were read for one request, and those in memory: nothing is read from a disk here.

    Loaded variants are pinned in the store until they are released.

    Attributes:
        nbytes: of all loaded variants, wherever else they are held.
    """

    def __init__(self, store: ChunkStore) -> None:
        self._store, self.request = store, store.new_request()
        self._found: dict[VariantKey, StoredVariant] = {}
        self.nbytes = 0
        self.on_release: Callable[[], None] | None = None

    def find(self, chunk: str) -> list[VariantFacts]:
        """See `ChunkSource`."""
        found = {facts.name: facts for facts in self._store.find_held(chunk)}
        found |= {one.facts.name: one.facts for one in self._found.values() if one.facts.chunk == chunk}
        return list(found.values())

    def take(self, facts: VariantFacts, share: float, use: ChunkUse) -> StoredVariant | None:
        """See `ChunkSource`."""
        found = self._found.get(VariantKey(facts.chunk, facts.name))
        return self._store.take_held(facts, share, use) if found is None else found

    def missed(self) -> None:
        """See `ChunkSource`."""
        self._store.missed()

    def add(self, variant: StoredVariant) -> None:
        """One more; the same again changes nothing."""
        place = VariantKey(variant.facts.chunk, variant.facts.name)
        if place not in self._found:
            self._store.pin(variant.facts)
            self._found[place] = variant
            self.nbytes += variant.nbytes

    def release(self) -> None:
        """The request needs them no longer; a second call does nothing."""
        for variant in self._found.values():
            self._store.unpin(variant.facts)
        self._found, self.nbytes = {}, 0
        if self.on_release is not None:
            self.on_release()
            self.on_release = None


class LoadingSource:
    """Both tiers of a store, in the thread that loads: what is taken is noted for the request."""

    def __init__(self, store: ChunkStore, loaded: LoadedChunks) -> None:
        self._store, self._loaded, self.request = store, loaded, loaded.request

    def find(self, chunk: str) -> list[VariantFacts]:
        """See `ChunkSource`."""
        return self._store.find(chunk)

    def take(self, facts: VariantFacts, share: float, use: ChunkUse) -> StoredVariant | None:
        """See `ChunkSource`."""
        found = self._store.take(facts, share, use)
        if found is not None:
            self._loaded.add(found)
        return found

    def missed(self) -> None:
        """Counted when the prompt begins: another request may have stored the chunk by then."""
