"""Requests that decode together, since their caches have the same method, budget and format."""

from __future__ import annotations

from millpond.cache.batch_cache import BatchCache
from millpond.engine.completion import CompletionState
from millpond.engine.outputs import KVStats
from millpond.runner.cache_factory import CacheFactory
from millpond.runner.packed_model import LayerShape


class DecodeGroup:
    """One batch of caches, and whose they are.

    Args:
        layers: what each layer of the model stores.

    Attributes:
        cache_factory: how their caches are made. batch_cache: the caches. completions: whose sequences these are, in
            order.
        is_skippable: these answers may pass a step. alike: batches whose caches are kept in the same way, this one
            among them, of which each has at most a micro-batch of answers.
    """

    def __init__(self, cache_factory: CacheFactory, layers: list[LayerShape], apart: bool = False) -> None:
        self.is_skippable = apart
        self.alike = [self]
        self.cache_factory = cache_factory
        self.batch_cache = cache_factory.make_cache()
        self.completions: list[CompletionState] = []
        self._layers = layers
        self._other: DecodeGroup | None = None

    @property
    def other(self) -> DecodeGroup:
        """The second batch whose caches are kept in the same way: of those who may pass a step, or may not."""
        if self._other is None:
            self._other = DecodeGroup(self.cache_factory, self._layers, not self.is_skippable)
            self._other._other = self
        return self._other

    def with_room(self, n: int) -> DecodeGroup:
        """One of the batches `alike` that `n` more answers may join; a request's answers stay together."""
        most = None if self.cache_factory.tier is None else self.cache_factory.tier.micro_batch
        for batch in self.alike:
            if most is None or not batch.completions or len(batch.completions) + n <= most:
                return batch
        batch = DecodeGroup(self.cache_factory, self._layers, self.is_skippable)
        batch.alike = self.alike
        self.alike.append(batch)
        return batch

    @property
    def slots(self) -> int:
        """Entries per page."""
        first = self._layers[0]
        return self.cache_factory.pool(first).slots

    def join(self, batch_cache: BatchCache, completions: list[CompletionState]) -> None:
        """Add answers that begin or resume decoding; `batch_cache` holds a sequence for each and is empty
        afterwards."""
        assert batch_cache.n_seq == len(completions), "a sequence for each answer"
        self.batch_cache.join(batch_cache)
        self.completions += completions

    def part(self, completions: list[CompletionState]) -> BatchCache:
        """Answers stop decoding for now; returns their caches."""
        own = self.cache_factory.make_cache()
        chosen = [self.completions.index(completion) for completion in completions]
        self.batch_cache.part(chosen, own)
        self.completions = [completion for completion in self.completions if completion not in completions]
        return own

    def close_gaps(self, reach: int) -> None:
        """Before a step: let texts go on whose next token would stand at `reach` positions.

        Raises:
            PoolFullError: no room for copies of pages that answers share.
        """
        for sequence in (self.batch_cache.tracker.seen >= reach).nonzero()[0].tolist():
            self.batch_cache.close_gaps(sequence)

    def leave(self) -> None:
        """Forget the answers that are finished, and give their pages back."""
        stay = [place for place, completion in enumerate(self.completions) if not completion.finished]
        if len(stay) < len(self.completions):
            self.batch_cache.select(stay)
            self.completions = [self.completions[place] for place in stay]

    def clear(self) -> None:
        """Forget all answers and give their pages back."""
        self.batch_cache.clear()
        self.completions = []

    def update_stats(self) -> None:
        """Tell every answer what its cache holds now."""
        for completion, figures in zip(
            self.completions, figures_of(self.batch_cache, self.cache_factory, self._layers), strict=True
        ):
            completion.count(figures)


def figures_of(batch_cache: BatchCache, cache_factory: CacheFactory, layers: list[LayerShape]) -> list[KVStats]:
    """What each sequence of a batch cache holds."""
    held, seen = batch_cache.held(), batch_cache.tracker.seen + batch_cache.tracker.closed
    heads = sum(layer.n_kv_heads for layer in layers)
    kv_bytes, used = batch_cache.kv_bytes(held).tolist(), batch_cache.used_bytes(held).tolist()
    entry_bytes = sum(cache_factory.entry_bytes(layer) for layer in layers)
    entries = held.sum((0, 2))
    return [
        KVStats(
            seen=int(seen[s]),
            held=float(entries[s]) / heads,
            kv_bytes=kv_bytes[s],
            full_kv_bytes=int(seen[s]) * entry_bytes,
            evicted=int(seen[s]) * heads - int(entries[s]),
            unused_bytes=max(0, kv_bytes[s] - used[s]),
            state_bytes=cache_factory.state_bytes,
        )
        for s in range(batch_cache.n_seq)
    ]
