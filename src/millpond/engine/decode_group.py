"""Requests that decode together, since their caches have the same method, budget and format."""

from __future__ import annotations

from collections.abc import Callable

from millpond.cache.batch_cache import BatchCache
from millpond.engine.completion import CompletionState
from millpond.engine.outputs import KVStats
from millpond.runner.cache_factory import CacheFactory
from millpond.runner.packed_model import LayerShape

#: Returns the sizes of some sequences as they were when it was made.
Figures = Callable[[], list[KVStats]]


class DecodeGroup:
    """One batch of caches, and the answers that own them.

    Args:
        cache_factory: Factory of their caches.
        layers: Shapes of the model's layers.
        is_skippable: Whether these answers may pass a step.

    Attributes:
        cache_factory: Factory of their caches.
        batch_cache: The caches.
        completions: Answers whose sequences these are, in order.
        is_skippable: Whether these answers may pass a step.
        alike: Batches whose caches are kept in the same way, this one among them, each with at most a micro-batch of
            answers.
    """

    def __init__(self, cache_factory: CacheFactory, layers: list[LayerShape], is_skippable: bool = False) -> None:
        self.is_skippable = is_skippable
        self.alike = [self]
        self.cache_factory = cache_factory
        self.batch_cache = cache_factory.make_cache()
        self.completions: list[CompletionState] = []
        self._layers = layers
        self._other: DecodeGroup | None = None

    @property
    def other(self) -> DecodeGroup:
        """Second batch whose caches are kept in the same way, with the other value of `is_skippable`."""
        if self._other is None:
            self._other = DecodeGroup(self.cache_factory, self._layers, not self.is_skippable)
            self._other._other = self
        return self._other

    def with_room(self, n: int) -> DecodeGroup:
        """Return one of the batches `alike` that `n` more answers may join.

        A request's answers stay together.
        """
        max_answers = None if self.cache_factory.tier is None else self.cache_factory.tier.micro_batch
        for batch in self.alike:
            if max_answers is None or not batch.completions or len(batch.completions) + n <= max_answers:
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
        """Add answers that begin or resume decoding.

        Args:
            batch_cache: Cache with a sequence for each answer; empty afterwards.
            completions: The answers.
        """
        assert batch_cache.n_seq == len(completions), "a sequence for each answer"
        self.batch_cache.join(batch_cache)
        self.completions += completions

    def part(self, completions: list[CompletionState]) -> BatchCache:
        """Remove answers that stop decoding for now, and return their caches."""
        parted_cache = self.cache_factory.make_cache()
        sequences = [self.completions.index(completion) for completion in completions]
        self.batch_cache.part(sequences, parted_cache)
        self.completions = [completion for completion in self.completions if completion not in completions]
        return parted_cache

    def close_gaps(self, reach: int) -> None:
        """Close gaps of texts whose next token would have position `reach`, before a step.

        Raises:
            PoolFullError: no memory for copies of pages that answers share.
        """
        for sequence in (self.batch_cache.tracker.seen >= reach).nonzero()[0].tolist():
            self.batch_cache.close_gaps(sequence)

    def leave(self) -> None:
        """Remove the answers that are finished, and free their pages."""
        unfinished = [index for index, completion in enumerate(self.completions) if not completion.finished]
        if len(unfinished) < len(self.completions):
            self.batch_cache.select(unfinished)
            self.completions = [self.completions[index] for index in unfinished]

    def clear(self) -> None:
        """Remove all answers and free their pages."""
        self.batch_cache.clear()
        self.completions = []

    def figures(self) -> Figures:
        """Return a function that returns the size of every answer's cache now.

        See `figures_to_come`.
        """
        return figures_to_come(self.batch_cache, self.cache_factory, self._layers)

    def update_stats(self) -> None:
        """Record in every answer the size of its cache now."""
        for completion, figures in zip(self.completions, self.figures()(), strict=True):
            completion.count(figures)


def figures_of(batch_cache: BatchCache, cache_factory: CacheFactory, layers: list[LayerShape]) -> list[KVStats]:
    """Return the size of each sequence of a batch cache."""
    return figures_to_come(batch_cache, cache_factory, layers)()


def figures_to_come(batch_cache: BatchCache, cache_factory: CacheFactory, layers: list[LayerShape]) -> Figures:
    """Return a function that returns the size of each sequence of a batch cache as it is now.

    Only its call may wait: for the work that was launched before.
    """
    sizes, seen = batch_cache.sizes(), batch_cache.tracker.seen + batch_cache.tracker.closed
    outside, heads = batch_cache.outside(), sum(layer.n_kv_heads for layer in layers)
    entry_bytes = sum(cache_factory.entry_bytes(layer) for layer in layers)

    def figures() -> list[KVStats]:
        held, kv_bytes, used = (numbers.tolist() for numbers in sizes())
        entries = [n + int(more) for n, more in zip(held, outside, strict=True)]
        return [
            KVStats(
                seen=int(seen[s]),
                held=float(entries[s]) / heads,
                kv_bytes=kv_bytes[s],
                full_kv_bytes=int(seen[s]) * entry_bytes,
                evicted=int(seen[s]) * heads - entries[s],
                unused_bytes=max(0, kv_bytes[s] - used[s]),
                state_bytes=cache_factory.state_bytes,
            )
            for s in range(len(entries))
        ]

    return figures
