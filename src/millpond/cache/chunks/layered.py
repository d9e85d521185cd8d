"""Variant of a chunk that is read layer by layer, while its prompt uses the layers that are in (Cache-Craft)."""

from __future__ import annotations

from threading import Condition

from torch import Tensor

from millpond.cache.chunks.file_format import LayerReader
from millpond.cache.chunks.tiers import ChunkUse, VariantKey
from millpond.cache.chunks.variant import StoredShape, StoredVariant
from millpond.errors import MillpondError


class LostLayerError(MillpondError):
    """A layer of a chunk that has not been read, or cannot be."""


class LayeredVariant:
    """Variant whose layers arrive one by one from its file; see `ReadableVariant`.

    One thread reads layers, another one uses them, and may wait for those that are not in yet.

    Args:
        reader: Its open file.
        shape: Shape of the variants of the store.
        use: Access of the prompt that reads it.

    Attributes:
        reader: Its open file.
        use: Access of the prompt that reads it.
        facts: Facts of the variant.
        scores: Attention of each token to all earlier parts, (n_tokens,) float32.
        nbytes: Bytes of all its tensors.
        is_lost: Whether layers that are not in will never be.
    """

    def __init__(self, reader: LayerReader, shape: StoredShape, use: ChunkUse) -> None:
        self.reader, self.use, self.facts, self.scores = reader, use, reader.facts, reader.scores
        self.nbytes = shape.nbytes(self.facts.n_tokens)
        self.is_lost = False
        self._shape = shape
        self._tensors: dict[str, Tensor] = {"scores": reader.scores}
        self._n_in = 0
        self._changed = Condition()

    @property
    def key(self) -> VariantKey:
        """Key of the chunk and name of the variant."""
        return VariantKey(self.facts.chunk, self.facts.name)

    @property
    def is_whole(self) -> bool:
        """Whether all layers are in."""
        return self._n_in == len(self._shape.layers)

    def add(self, tensors: dict[str, Tensor] | None) -> None:
        """Add the tensors of the next layer; None: it is lost."""
        with self._changed:
            if tensors is None:
                self.is_lost = True
            else:
                self._tensors |= tensors
                self._n_in += 1
            self._changed.notify_all()

    def close(self) -> None:
        """Close the file; layers that are not in are lost."""
        self.reader.close()
        if not self.is_whole:
            self.add(None)

    def stored(self) -> StoredVariant:
        """Return the variant as a store keeps it; all layers are in."""
        assert self.is_whole, "read to the end"
        return StoredVariant(self.facts, self._shape, self._tensors)

    def keys(self, layer: int) -> Tensor:
        """Return the keys before RoPE of a layer, (Hkv, n_tokens, key_dim).

        Raises:
            LostLayerError: they are not in.
        """
        self._check(layer)
        return self._shape.decoded(self._tensors, f"keys.{layer}", self._shape.layers[layer][1], True)

    def values(self, layer: int) -> Tensor:
        """Return the values of a layer, (Hkv, n_tokens, value_dim), as `keys`."""
        self._check(layer)
        return self._shape.decoded(self._tensors, f"values.{layer}", self._shape.layers[layer][2], False)

    def wait_for(self, layer: int, seconds: float) -> bool:
        """Wait at most `seconds` for a layer, and return whether it is in."""
        with self._changed:
            self._changed.wait_for(lambda: self._n_in > layer or self.is_lost, seconds)
            return self._n_in > layer

    def _check(self, layer: int) -> None:
        if self._n_in <= layer:
            raise LostLayerError(f"layer {layer} of the chunk {self.facts.chunk[:16]} has not been read")
