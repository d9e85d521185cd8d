"""Trained networks of a model: one per attention layer, with the mark of the model that they are made for."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Generic, Protocol, Self, TypeVar

import torch
from torch import Tensor

from millpond.errors import CacheMismatchError
from millpond.kernels.linear import has_products

#: Binary digits of a score behind the point. Rounding moves a float32 product by its last few digits, and how many
#: tokens were multiplied at once would decide between entries that are equal but for that.
SCORE_DIGITS = 14


class LayerNetwork(Protocol):
    """The network of one layer, as tensors under the names of its parts."""

    #: Names of its tensors, in the order in which it is made of them.
    PARTS: ClassVar[tuple[str, ...]]

    def to(self, device: torch.device, dtype: torch.dtype = torch.float32) -> Self:
        """The same on a device: what is multiplied with features in `dtype`, the rest in float32."""
        ...

    def check(self, layer: int, inputs: int, n_kv_heads: int) -> None:
        """
        Raises:
            CacheMismatchError: `layer` gives other numbers of a token than it takes, or has other KV heads.
        """
        ...


L = TypeVar("L", bound=LayerNetwork)


@dataclass(frozen=True, slots=True, eq=False)
class TrainedNetworks(Generic[L]):
    """The networks of a model that score its entries.

    Attributes:
        layers: one per attention layer. model: the mark of the model. name: its class, for people.
        facts: how they were trained: data, steps, seed ...
        digest: of all numbers; equal where the scores are.
    """

    layers: Sequence[L]
    model: str
    name: str
    facts: Mapping[str, str] = field(default_factory=dict)
    digest: str = field(init=False, default="")
    _placed: dict[tuple[int, torch.device, torch.dtype], L] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        digest = hashlib.blake2b(digest_size=16)
        for layer in self.layers:
            for part in layer.PARTS:
                digest.update(getattr(layer, part).detach().float().cpu().contiguous().numpy().tobytes())
        object.__setattr__(self, "digest", digest.hexdigest())

    def at(self, layer: int, features: Tensor, n_kv_heads: int) -> L:
        """The network of a layer where its features (..., inputs) are.

        Its large products are in bfloat16 where features are, on a CPU that has instructions for it; else in float32.

        Raises:
            CacheMismatchError: they are of a model of another shape.
        """
        if layer >= len(self.layers):
            raise CacheMismatchError(
                f"the model has a layer {layer}, and these networks are of {len(self.layers)} layers: take those of "
                "this model"
            )
        small = features.dtype is torch.bfloat16 and features.is_cpu and has_products(features)
        place = layer, features.device, torch.bfloat16 if small else torch.float32
        if place not in self._placed:
            self._placed[place] = self.layers[layer].to(*place[1:])
        found = self._placed[place]
        found.check(layer, features.shape[-1], n_kv_heads)
        return found


def features_of(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """(B, n, inputs): query, key and value of each token, all heads side by side; bfloat16 as they are, else float32.

    Shapes: q (B, query heads, n, key_dim), k (B, KV heads, n, key_dim), v (B, KV heads, n, value_dim).
    """
    dtype = torch.bfloat16 if q.dtype is k.dtype is v.dtype is torch.bfloat16 else torch.float32
    return torch.cat([part.to(dtype).transpose(1, 2).flatten(2) for part in (q, k, v)], -1)


def rounded(score: Tensor) -> Tensor:
    """`score` in SCORE_DIGITS binary digits behind the point."""
    found: Tensor = (score * 2**SCORE_DIGITS).round() / 2**SCORE_DIGITS
    return found
