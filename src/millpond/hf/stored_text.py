"""Layers of a text whose file holds codes of the codec `transform`, decoded one by one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from millpond.cache.coded.entries import decoded
from millpond.cache.types import RotaryEmbedding
from millpond.codec.transform.page import TOKENS, PageAddress
from millpond.codec.transform.prompt_header import LayerHeader, SideHeader
from millpond.codec.transform.transform_file import ModelTransform
from millpond.errors import DataError
from millpond.hf.text_storage import SMALL


@dataclass(frozen=True, slots=True)
class StoredText:
    """Text whose layers are decoded from named tensors.

    Attributes:
        transform: The model's transform.
        rotations: Rotation of each layer's keys; None for one without.
        n_tokens: Tokens of the text.
        unit: Number of the text, in every page.
        dtype: Type of live entries.
        device: Device of the model, which computes.
    """

    transform: ModelTransform
    rotations: list[RotaryEmbedding | None]
    n_tokens: int
    unit: int
    dtype: torch.dtype
    device: torch.device

    def layer(self, nth: int, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a layer as `millpond.cache.serialization.from_tensors` reads it.

        Args:
            nth: Number of the layer among those with entries.
            stored: Tensors of the layer, without the prefix of their names.

        Raises:
            DataError: a tensor is missing, damaged, or does not fit the others; nothing was decoded.
        """
        try:
            first, n = (int(number) for number in stored["span"].tolist())
            pages, at = stored["pages"], stored["exact.at"].long()
            exact = (stored["exact.keys"], stored["exact.values"])
            headers = (stored["key_header"], stored["value_header"])
            small = {name: stored[name] for name in SMALL}
        except (KeyError, ValueError, TypeError) as error:
            raise DataError(f"layer {nth}: the file lacks {error}; save the text again") from None
        heads, *dims = self.transform.model.shapes[nth]

        def need(right: bool, rule: str) -> None:
            if not right:
                raise DataError(f"layer {nth}: the file does not fit together ({rule}); save the text again")

        need(first >= 0 and n > 0 and first + n == self.n_tokens, f"it holds tokens up to {self.n_tokens - 1}")
        need(pages.ndim == 2 and len(pages) * TOKENS <= n, "pages have no more tokens than there are")
        coded = len(pages) * TOKENS
        need(at.ndim == 1 and bool((at[1:] > at[:-1]).all()), "exact tokens ascend")
        need(not len(at) or (int(at[0]) >= 0 and int(at[-1]) < n), "exact tokens are of the text")
        need(int((at >= coded).sum()) == n - coded, "what no page holds is exact")
        for tensor, dim in zip(exact, dims, strict=True):
            need(tensor.shape == (heads, len(at), dim) and tensor.is_floating_point(), "exact tokens have all heads")
        key, value = (side.to(self.device) for side in self.transform.layers[nth])
        shape, rotary = self.transform.model.shapes[nth], self.rotations[nth]
        header = LayerHeader(
            SideHeader.from_bytes(headers[0], key.n_rows, self.device),
            SideHeader.from_bytes(headers[1], value.n_rows, self.device),
        )
        address = PageAddress(self.unit, nth)
        keys, values = decoded((key, value), header, pages, address, shape, first, rotary)
        held = []
        for tokens, tensor, dim in zip((keys, values), exact, dims, strict=True):
            entries = torch.zeros((heads, n, dim), dtype=self.dtype, device=self.device)
            entries[:, :coded] = tokens.to(self.dtype)
            entries[:, at.to(self.device)] = tensor.to(entries)
            held.append(entries)
        return small | {
            "keys": held[0],
            "values": held[1],
            "positions": torch.arange(first, first + n, dtype=torch.int32).expand(heads, -1).contiguous(),
            "scores": torch.zeros(heads, n),
            "lens": torch.full((heads,), n, dtype=torch.int32),
        }
