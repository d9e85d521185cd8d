"""Layers of a chunk in a storage codec: pages of its whole groups of 32 tokens, and the other tokens as they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from millpond.cache.coded.entries import decoded, joined
from millpond.codec.transform.coding import encode_tokens
from millpond.codec.transform.exact_tokens import SINKS
from millpond.codec.transform.page import TOKENS, PageAddress, page_bytes
from millpond.codec.transform.prompt_header import LayerHeader, plain_headers
from millpond.codec.transform.storage_codec import StorageCodec
from millpond.codec.transform.transform_file import ModelTransform

#: Number of the text in the pages of all chunks: their files say which chunk it is.
_UNIT = 0


@dataclass(frozen=True, slots=True, eq=False)
class ChunkCodec:
    """Codes chunks of a model under the header of the calibration.

    The first four tokens of a chunk, and those of no whole page, stay as they are.

    Attributes:
        transform: The model's transform.
        name: Name of the codec, such as "transform:1.5".
        headers: Header of each layer.
    """

    transform: ModelTransform
    name: str
    headers: tuple[LayerHeader, ...]

    @classmethod
    def of(cls, transform: ModelTransform, codec: StorageCodec) -> ChunkCodec:
        """Return the codec of a model.

        Raises:
            OptionError: a transform of fewer bits.
        """
        transform.check_bits(codec.bits)
        return cls(transform, codec.name, tuple(plain_headers(transform.layers, codec.bits)))

    @property
    def mark(self) -> str:
        """Name and digest of the transform, equal where codes can be read."""
        return f"{self.name}-{self.transform.digest()[:16]}"

    def tensors(self, layer: int, n: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return shape and dtype of the tensors of a layer of a chunk of `n` tokens, by name."""
        heads, key_dim, value_dim = self.transform.model.shapes[layer]
        exact = int(_exact(n).sum())
        return {
            f"pages.{layer}": ((n // TOKENS, page_bytes(self.headers[layer].bits)), torch.uint8),
            f"keys.{layer}": ((heads, exact, key_dim), torch.bfloat16),
            f"values.{layer}": ((heads, exact, value_dim), torch.bfloat16),
        }

    def encode(self, layer: int, keys: Tensor, values: Tensor) -> dict[str, Tensor]:
        """Return the tensors of a layer of a chunk.

        Args:
            layer: Number of the layer.
            keys: Keys before RoPE (H, n, D).
            values: Values (H, n, V).
        """
        sides, n = self.transform.layers[layer], keys.shape[1]
        pages = torch.zeros(self.tensors(layer, n)[f"pages.{layer}"][0], dtype=torch.uint8)
        if len(pages):
            key, value = (joined(side[:, : len(pages) * TOKENS].float().cpu()) for side in (keys, values))
            pages = encode_tokens(sides, self.headers[layer], (key, value), PageAddress(_UNIT, layer))
        exact = _exact(n)
        kept = (side.cpu()[:, exact].bfloat16() for side in (keys, values))
        return {f"pages.{layer}": pages, **dict(zip((f"keys.{layer}", f"values.{layer}"), kept, strict=True))}

    def decode(self, layer: int, tensors: Mapping[str, Tensor], n: int) -> tuple[Tensor, Tensor]:
        """Return the keys before RoPE and the values of a layer of a chunk of `n` tokens, float32.

        Raises:
            DataError: a page is damaged.
        """
        shape, address = self.transform.model.shapes[layer], PageAddress(_UNIT, layer)
        header, pages = self.headers[layer], tensors[f"pages.{layer}"]
        tokens = decoded(self.transform.layers[layer], header, pages, address, shape, 0, None)
        exact, found = _exact(n), []
        for coded, name in zip(tokens, ("keys", "values"), strict=True):
            side = torch.zeros(len(coded), n, coded.shape[2])
            side[:, : coded.shape[1]] = coded
            side[:, exact] = tensors[f"{name}.{layer}"].float()
            found.append(side)
        return found[0], found[1]


def _exact(n: int) -> Tensor:
    """Return which of the tokens of a chunk stay as they are, (n,) bool."""
    exact = torch.zeros(n, dtype=torch.bool)
    exact[:SINKS] = exact[n // TOKENS * TOKENS :] = True
    return exact
