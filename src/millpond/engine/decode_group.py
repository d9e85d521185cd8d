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
        recipe: how their caches are made. stack: the caches. answers: whose sequences these are, in order.
        apart: these answers may pass a step. alike: batches whose caches are kept in the same way, this one among them,
            of which each has at most a micro-batch of answers.
    """

    def __init__(self, recipe: CacheFactory, layers: list[LayerShape], apart: bool = False) -> None:
        self.apart = apart
        self.alike = [self]
        self.recipe = recipe
        self.stack = recipe.stack()
        self.answers: list[CompletionState] = []
        self._layers = layers
        self._other: DecodeGroup | None = None

    @property
    def other(self) -> DecodeGroup:
        """The second batch whose caches are kept in the same way: of those who may pass a step, or may not."""
        if self._other is None:
            self._other = DecodeGroup(self.recipe, self._layers, not self.apart)
            self._other._other = self
        return self._other

    def with_room(self, n: int) -> DecodeGroup:
        """One of the batches `alike` that `n` more answers may join; a request's answers stay together."""
        most = None if self.recipe.tier is None else self.recipe.tier.micro_batch
        for batch in self.alike:
            if most is None or not batch.answers or len(batch.answers) + n <= most:
                return batch
        batch = DecodeGroup(self.recipe, self._layers, self.apart)
        batch.alike = self.alike
        self.alike.append(batch)
        return batch

    @property
    def slots(self) -> int:
        """Entries per page."""
        first = self._layers[0]
        return self.recipe.pool(first).slots

    def join(self, stack: BatchCache, answers: list[CompletionState]) -> None:
        """Add answers that begin or resume decoding; `stack` holds a sequence for each and is empty afterwards."""
        assert stack.n_seq == len(answers), "a sequence for each answer"
        self.stack.join(stack)
        self.answers += answers

    def part(self, answers: list[CompletionState]) -> BatchCache:
        """Answers stop decoding for now; returns their caches."""
        own = self.recipe.stack()
        chosen = [self.answers.index(answer) for answer in answers]
        self.stack.part(chosen, own)
        self.answers = [answer for answer in self.answers if answer not in answers]
        return own

    def close_gaps(self, reach: int) -> None:
        """Before a step: let texts go on whose next token would stand at `reach` positions.

        Raises:
            PoolFullError: no room for copies of pages that answers share.
        """
        for sequence in (self.stack.tracker.seen >= reach).nonzero()[0].tolist():
            self.stack.close_gaps(sequence)

    def leave(self) -> None:
        """Forget the answers that are finished, and give their pages back."""
        stay = [place for place, answer in enumerate(self.answers) if not answer.finished]
        if len(stay) < len(self.answers):
            self.stack.select(stay)
            self.answers = [self.answers[place] for place in stay]

    def clear(self) -> None:
        """Forget all answers and give their pages back."""
        self.stack.clear()
        self.answers = []

    def update_stats(self) -> None:
        """Tell every answer what its cache holds now."""
        for answer, figures in zip(self.answers, figures_of(self.stack, self.recipe, self._layers), strict=True):
            answer.count(figures)


def figures_of(stack: BatchCache, recipe: CacheFactory, layers: list[LayerShape]) -> list[KVStats]:
    """What each sequence of a stack holds."""
    held, seen = stack.held(), stack.tracker.seen + stack.tracker.closed
    heads = sum(layer.n_kv_heads for layer in layers)
    kv_bytes, used = stack.kv_bytes(held).tolist(), stack.used_bytes(held).tolist()
    entry_bytes = sum(recipe.entry_bytes(layer) for layer in layers)
    entries = held.sum((0, 2))
    return [
        KVStats(
            seen=int(seen[s]),
            held=float(entries[s]) / heads,
            kv_bytes=kv_bytes[s],
            full_kv_bytes=int(seen[s]) * entry_bytes,
            evicted=int(seen[s]) * heads - int(entries[s]),
            unused_bytes=max(0, kv_bytes[s] - used[s]),
            state_bytes=recipe.state_bytes,
        )
        for s in range(stack.n_seq)
    ]
