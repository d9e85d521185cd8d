"""Two-layer GELU network over the hidden states of one layer (KVzap-MLP, arXiv:2601.07891)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from millpond.kernels.linear import linear
from millpond.policy.trained.hidden_networks import check_shape

#: Hidden states have so many times the numbers of the network's middle, by default.
NARROWER = 8


@dataclass(frozen=True, slots=True, eq=False)
class GeluScore:
    """Network s = W2 GELU(W1 h + b1) + b2, with the exact GELU.

    Attributes:
        w1: (middle, width).
        b1: (middle,).
        w2: (KV heads, middle).
        b2: (KV heads,).
    """

    PARTS: ClassVar[tuple[str, ...]] = ("w1", "b1", "w2", "b2")

    w1: Tensor
    b1: Tensor
    w2: Tensor
    b2: Tensor

    @property
    def inputs(self) -> int:
        """See `HiddenNetwork.inputs`."""
        return self.w1.shape[1]

    @property
    def n_scored(self) -> int:
        """See `HiddenNetwork.n_scored`."""
        return len(self.b2)

    def raw(self, hidden: Tensor) -> Tensor:
        """See `HiddenNetwork.raw`."""
        return F.linear(F.gelu(linear(hidden.to(self.w1), self.w1, self.b1).to(self.w2)), self.w2, self.b2)

    def to(self, device: torch.device, dtype: torch.dtype = torch.float32) -> GeluScore:
        """See `LayerNetwork.to`."""
        first, second = (self.w1, self.b1), (self.w2, self.b2)
        return GeluScore(*(t.to(device, dtype) for t in first), *(t.to(device, torch.float32) for t in second))

    def check(self, layer: int, inputs: int, n_kv_heads: int) -> None:
        """See `LayerNetwork.check`."""
        check_shape(self, layer, inputs, n_kv_heads)
