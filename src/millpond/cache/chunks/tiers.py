"""Memory tier of a chunk store, and the paging rule that chooses which variant leaves a full tier."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import NamedTuple

from millpond.cache.chunks.variant import StoredVariant, VariantFacts
from millpond.cache.paging.rule import PageFacts, PagingRule

_NONE = -1
#: Least CFO that a use counts with, so that an exact variant is not worth infinitely much.
MIN_SHARE = 0.05


class VariantKey(NamedTuple):
    """Key of a chunk and name of one of its variants."""

    chunk: str
    name: str


class ChunkUse(NamedTuple):
    """Access of a prompt to a variant.

    Attributes:
        request: Number of the prompt, growing.
        depth: Chunks before this one in the prompt.
        length: Chunks of the prompt.
        share: Share of the variant's tokens that the prompt computes (CFO); 1 where the variant is new.
    """

    request: int
    depth: int = 0
    length: int = 1
    share: float = 1.0

    @property
    def gain(self) -> float:
        """What the variant is worth to the prompt, 1 / CFO."""
        return 1 / max(self.share, MIN_SHARE)


class TierRule:
    """Variants of one tier as pages of its paging rule, without parents or followers.

    Args:
        rule: Paging rule of the tier.
    """

    def __init__(self, rule: PagingRule) -> None:
        self._rule = rule
        self._numbers: dict[VariantKey, int] = {}
        self._keys: list[VariantKey | None] = []
        self._last: list[int] = []  # request that used a number last
        self._unused: list[int] = []
        self._pins: dict[VariantKey, int] = {}

    def __contains__(self, key: VariantKey) -> bool:
        return key in self._numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[VariantKey]:
        return iter(list(self._numbers))

    def use(self, variant_key: VariantKey, use: ChunkUse) -> None:
        """Record that a prompt uses a variant; one prompt counts once.

        The variant is new if the tier did not hold it.
        """
        number = self._numbers.get(variant_key)
        is_known = number is not None
        if number is None:
            number = self._number_for(variant_key)
        elif self._last[number] == use.request:
            return
        self._last[number] = use.request
        key = int.from_bytes(hashlib.blake2b("/".join(variant_key).encode(), digest_size=8).digest(), "little")
        n_known = use.depth + 1 if is_known else use.depth
        facts = PageFacts(key, _NONE, use.request, use.depth, use.length, n_known, gain=use.gain)
        self._rule.touch(number, facts)
        if variant_key not in self._pins:
            self._rule.allow(number)

    def drop(self, key: VariantKey) -> None:
        """Forget a variant; a missing one is no error."""
        number = self._numbers.pop(key, None)
        if number is not None:
            self._rule.drop(number)
            self._keys[number] = None
            self._unused.append(number)

    def pin(self, key: VariantKey) -> None:
        """Keep a variant until it is unpinned as often, whether it is held yet or not."""
        self._pins[key] = self._pins.get(key, 0) + 1
        if self._pins[key] == 1 and key in self._numbers:
            self._rule.forbid(self._numbers[key])

    def unpin(self, key: VariantKey) -> None:
        """See `pin`."""
        self._pins[key] -= 1
        if not self._pins[key]:
            del self._pins[key]
            if key in self._numbers:
                self._rule.allow(self._numbers[key])

    def victim(self) -> VariantKey | None:
        """Return the variant to evict next; None if there is none that is not pinned.

        It stays until it is dropped.
        """
        number = self._rule.victim()
        return None if number is None else self._keys[number]

    def _number_for(self, key: VariantKey) -> int:
        if not self._unused:
            self._unused.append(len(self._keys))
            self._keys.append(None)
            self._last.append(_NONE)
        number = self._unused.pop()
        self._numbers[key], self._keys[number] = number, key
        return number


class MemoryTier:
    """Variants in memory. Not safe for several threads at once.

    Args:
        limit: Most bytes.
        rule: Rule that chooses the variants to evict.

    Attributes:
        rule: Variants as the rule sees them.
        nbytes: Bytes of all variants.
        evicted: Number of evicted variants.
    """

    def __init__(self, limit: int, rule: PagingRule) -> None:
        self.rule = TierRule(rule)
        self.nbytes = self.evicted = 0
        self._limit = limit
        self._held: dict[str, dict[str, StoredVariant]] = {}  # by chunk and name

    @property
    def n_free(self) -> int:
        """Bytes that nothing takes."""
        return self._limit - self.nbytes

    def facts(self, chunk: str) -> list[VariantFacts]:
        """Return the facts of a chunk's variants."""
        return [variant.facts for variant in self._held.get(chunk, {}).values()]

    def take(self, key: VariantKey, use: ChunkUse) -> StoredVariant | None:
        """Return a variant, for a prompt; None if it is not held."""
        variant = self._held.get(key.chunk, {}).get(key.name)
        if variant is not None:
            self.rule.use(key, use)
        return variant

    def hold(self, variant: StoredVariant, use: ChunkUse, evicts: bool = True) -> bool:
        """Hold a variant and evict others for it, if `evicts`.

        Returns:
            Whether it is held: not if it is larger than the tier, or if too many others are pinned.
        """
        if variant.nbytes > (self._limit if evicts else self.n_free):
            return False
        key = VariantKey(variant.facts.chunk, variant.facts.name)
        self.drop(key)
        while self.nbytes + variant.nbytes > self._limit:
            victim = self.rule.victim()
            if victim is None:
                return False
            self.drop(victim)
            self.evicted += 1
        self._held.setdefault(key.chunk, {})[key.name] = variant
        self.nbytes += variant.nbytes
        self.rule.use(key, use)
        return True

    def drop(self, key: VariantKey) -> None:
        """Forget a variant; a missing one is no error."""
        variants = self._held.get(key.chunk, {})
        if (dropped := variants.pop(key.name, None)) is not None:
            self.nbytes -= dropped.nbytes
            self.rule.drop(key)
            if not variants:
                del self._held[key.chunk]
