"""The page pools of all layers, each of which may have its own number format."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

from millpond.cache.pages.pool_set import PoolSet
from millpond.cache.pages.ref_counted_pool import RefCountedPool
from millpond.codec import Codec, Format, LayerCodecs


class LayerPools:
    """The pools of each layer; layers of one format share theirs.

    Args:
        sets: one of each layer, or a single one for all.
    """

    def __init__(self, sets: Sequence[PoolSet]) -> None:
        self._sets = list(sets)
        self._distinct = list(dict.fromkeys(sets))

    def of(self, layer: int) -> PoolSet:
        """The pools of a layer."""
        return self._sets[layer if len(self._sets) > 1 else 0]

    def by_layer(self, n_layers: int) -> list[PoolSet]:
        """The pools of each of `n_layers` layers."""
        return [self.of(layer) for layer in range(n_layers)]

    @property
    def format(self) -> Hashable:
        """How entries are stored, see `PoolSet.format`; of each layer, where they differ."""
        return self._sets[0].format if len(self._distinct) == 1 else tuple(one.format for one in self._sets)

    @property
    def codecs(self) -> list[Codec]:
        """The codecs of all layers, each once."""
        return [one.codec for one in self._distinct if one.codec is not None]

    @property
    def limited(self) -> bool:
        """Whether all pools together have a limit of bytes."""
        return self._sets[0].limited

    def __iter__(self) -> Iterator[RefCountedPool[Any]]:
        return (pool for one in self._distinct for pool in one)

    def __len__(self) -> int:
        return sum(len(one) for one in self._distinct)


def pools_by_layer(stored: LayerCodecs | Format, n_layers: int, make: Callable[[Format], PoolSet]) -> LayerPools:
    """The pools of `n_layers` layers, of which those of one format share what `make` returns for it."""
    if not isinstance(stored, LayerCodecs):
        return LayerPools([make(stored)])
    formats = [stored.of(layer) for layer in range(n_layers)]
    made = {one: make(one) for one in dict.fromkeys(formats)}
    return LayerPools([made[one] for one in formats])
