"""Linear network of one layer over its hidden states (KVzap-Linear, arXiv:2601.07891)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from millpond.kernels.linear import linear
from millpond.policy.trained.hidden_networks import check_shape


@dataclass(frozen=True, slots=True, eq=False)
class LinearScore:
    """Network s = W h + b.

    Attributes:
        w: (KV heads, width).
        b: (KV heads,).
    """

    PARTS: ClassVar[tuple[str, ...]] = ("w", "b")

    w: Tensor
    b: Tensor

    @property
    def inputs(self) -> int:
        """See `HiddenNetwork.inputs`."""
        return self.w.shape[1]

    @property
    def n_scored(self) -> int:
        """See `HiddenNetwork.n_scored`."""
        return len(self.b)

    def raw(self, hidden: Tensor) -> Tensor:
        """See `HiddenNetwork.raw`; in float32, since the few products cost nothing."""
        return linear(hidden.to(self.w), self.w, self.b)

    def to(self, device: torch.device, dtype: torch.dtype = torch.float32) -> LinearScore:
        """Return the network on a device, in float32 whatever `dtype` is."""
        return LinearScore(self.w.to(device, torch.float32), self.b.to(device, torch.float32))

    def check(self, layer: int, inputs: int, n_kv_heads: int) -> None:
        """See `LayerNetwork.check`."""
        check_shape(self, layer, inputs, n_kv_heads)
