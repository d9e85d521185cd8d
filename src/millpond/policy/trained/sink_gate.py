"""Gate of one layer in which a token attends to itself against learned sinks (Fast KVzip, arXiv:2601.17668)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from millpond.kernels.linear import linear
from millpond.policy.trained.hidden_networks import check_shape

#: Added to a mean square before its root.
EPSILON = 1e-6


@dataclass(frozen=True, slots=True, eq=False)
class SinkGate:
    """Gate in which a token attends to itself against learned sinks.

    p = mean over the group of 1 / (1 + sum_m exp(q . sink_m / sqrt(d) - z)), z = q . k / sqrt(d) + b.

    q = RMSNorm(Wq h + bq) of each query head, k = RMSNorm(Wk h) of its KV head, of a small width d. Unlike in the
    authors' training script, b enters once, as in their inference.

    Attributes:
        wq: (KV heads * group * d, width), KV heads outermost.
        bq: (KV heads * group * d,).
        wk: (KV heads * d, width).
        q_norm: (d,) factors of the norm of queries.
        k_norm: (d,) factors of the norm of keys.
        sinks: (KV heads, n_sinks, d).
        bias: (KV heads, group).
    """

    PARTS: ClassVar[tuple[str, ...]] = ("wq", "bq", "wk", "q_norm", "k_norm", "sinks", "bias")

    wq: Tensor
    bq: Tensor
    wk: Tensor
    q_norm: Tensor
    k_norm: Tensor
    sinks: Tensor
    bias: Tensor

    @property
    def inputs(self) -> int:
        """See `HiddenNetwork.inputs`."""
        return self.wk.shape[1]

    @property
    def n_scored(self) -> int:
        """See `HiddenNetwork.n_scored`."""
        return len(self.bias)

    def raw(self, hidden: Tensor) -> Tensor:
        """See `HiddenNetwork.raw`: 0 to 1."""
        (n_kv_heads, group), width = self.bias.shape, len(self.k_norm)
        x = hidden.to(self.wq)
        q = _normed(linear(x, self.wq, self.bq).float().view(-1, n_kv_heads, group, width), self.q_norm)
        k = _normed(linear(x, self.wk).float().view(-1, n_kv_heads, 1, width), self.k_norm)
        own = (q * k).sum(-1) / width**0.5 + self.bias
        sinks = torch.einsum("nhgd,hsd->nhgs", q, self.sinks) / width**0.5
        return torch.sigmoid(own - sinks.logsumexp(-1)).mean(-1)

    def to(self, device: torch.device, dtype: torch.dtype = torch.float32) -> SinkGate:
        """See `LayerNetwork.to`."""
        large = (self.wq, self.bq, self.wk)
        small = (self.q_norm, self.k_norm, self.sinks, self.bias)
        return SinkGate(*(t.to(device, dtype) for t in large), *(t.to(device, torch.float32) for t in small))

    def check(self, layer: int, inputs: int, n_kv_heads: int) -> None:
        """See `LayerNetwork.check`."""
        check_shape(self, layer, inputs, n_kv_heads)


def _normed(x: Tensor, factors: Tensor) -> Tensor:
    """Return RMSNorm of x (..., d) float32, times factors (d,)."""
    return x * (x.square().mean(-1, keepdim=True) + EPSILON).rsqrt() * factors
