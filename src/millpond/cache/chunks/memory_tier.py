"""Memory tier of a chunk store: variants up to a number of bytes."""

from __future__ import annotations

from millpond.cache.chunks.tier_rule import ChunkUse, Place, TierRule
from millpond.cache.chunks.variant import StoredVariant, VariantFacts
from millpond.cache.paging.rule import PagingRule


class MemoryTier:
    """Not safe for several threads at once.

    Args:
        limit: most bytes.

    Attributes:
        nbytes: of all variants. evicted: variants that left for room.
    """

    def __init__(self, limit: int, rule: PagingRule) -> None:
        self.rule = TierRule(rule)
        self.nbytes = self.evicted = 0
        self._limit = limit
        self._held: dict[str, dict[str, StoredVariant]] = {}  # by chunk and name

    def facts(self, chunk: str) -> list[VariantFacts]:
        """The variants of a chunk."""
        return [held.facts for held in self._held.get(chunk, {}).values()]

    def take(self, place: Place, use: ChunkUse) -> StoredVariant | None:
        """A variant, for a prompt; None where it is not held."""
        found = self._held.get(place.chunk, {}).get(place.name)
        if found is not None:
            self.rule.use(place, use)
        return found

    def hold(self, variant: StoredVariant, use: ChunkUse) -> None:
        """Hold a variant in place of others; not where it is larger than the tier, or prompts use too many others."""
        if variant.nbytes > self._limit:
            return
        place = Place(variant.facts.chunk, variant.facts.name)
        self.drop(place)
        while self.nbytes + variant.nbytes > self._limit:
            victim = self.rule.victim()
            if victim is None:
                return
            self.drop(victim)
            self.evicted += 1
        self._held.setdefault(place.chunk, {})[place.name] = variant
        self.nbytes += variant.nbytes
        self.rule.use(place, use)

    def drop(self, place: Place) -> None:
        """Forget a variant; one that is not there is no error."""
        held = self._held.get(place.chunk, {})
        if (gone := held.pop(place.name, None)) is not None:
            self.nbytes -= gone.nbytes
            self.rule.drop(place)
            if not held:
                del self._held[place.chunk]
