"""Networks in training, and the loss of Locret: smooth L1 to the labels, and little between neighbours."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

#: Weight of the squared differences of neighbouring scores, as in the paper's code.
NEIGHBOURS = 0.0025


class TrainedHeads(nn.Module):
    """The network of one layer while it is trained: W2 SiLU(W1 x + b1) + b2."""

    def __init__(self, inputs: int, width: int, n_kv_heads: int) -> None:
        super().__init__()
        self.first = nn.Linear(inputs, width)
        self.second = nn.Linear(width, n_kv_heads)

    def forward(self, features: Tensor) -> Tensor:
        """(KV heads, n) raw scores of features (n, inputs)."""
        raw: Tensor = self.second(F.silu(self.first(features)))
        return raw.T


def retaining_loss(scores: list[Tensor], labels: list[Tensor]) -> Tensor:
    """Mean over layers, heads and tokens of smooth L1(s, label) + 0.0025 sum over layers of mean (s_t - s_t+1)^2.

    Args:
        scores, labels: one (KV heads, n) per layer.
    """
    fit = torch.stack([F.smooth_l1_loss(s, y) for s, y in zip(scores, labels, strict=True)]).mean()
    rough = torch.stack([(s[:, 1:] - s[:, :-1]).square().mean() for s in scores]).sum()
    return fit + NEIGHBOURS * rough


def overlap(scores: Tensor, labels: Tensor, share: float = 0.1) -> Tensor:
    """(KV heads,) of the `share` entries with the highest labels, how many have the highest scores.

    Args:
        scores, labels: (KV heads, n).
    """
    n = scores.shape[1]
    count = max(1, round(share * n))
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, scores.topk(count, 1).indices, True)
    best = torch.zeros_like(chosen).scatter_(1, labels.topk(count, 1).indices, True)
    return (chosen & best).sum(1) / count
