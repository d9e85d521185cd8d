"""Fits of one layer's network to samples: ridge regression, or a GELU network by AdamW (KVzap's recipe)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from millpond.policy.trained.gelu_score import GeluScore
from millpond.policy.trained.hidden_networks import HiddenNetwork
from millpond.policy.trained.linear_score import LinearScore

#: Weight of the squared factors of a ridge regression.
RIDGE = 1.0
#: The authors' numbers: highest learning rate, samples of a step, bound of the gradient.
LR, BATCH, CLIP = 5e-3, 512, 1.0


def fit_linear(hidden: Tensor, labels: Tensor) -> LinearScore:
    """The ridge regression with an intercept of labels (n, KV heads) on hidden states (n, width)."""
    x, y = hidden.double(), labels.double()
    x_mean, y_mean = x.mean(0), y.mean(0)
    centred = x - x_mean
    gram = centred.T @ centred + RIDGE * torch.eye(x.shape[1], dtype=x.dtype, device=x.device)
    w = torch.linalg.solve(gram, centred.T @ (y - y_mean)).T
    return LinearScore(w.float().contiguous(), (y_mean - w @ x_mean).float())


def fit_gelu(hidden: Tensor, labels: Tensor, middle: int, epochs: int, seed: int) -> GeluScore:
    """The network that `epochs` of AdamW end with, on the mean squared error; the rate falls as a cosine.

    Labels are centred and scaled per head while it is trained, which the last layer undoes.
    """
    mean, scale = labels.mean(0), labels.std(0).clamp(min=1e-6)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = nn.Sequential(nn.Linear(hidden.shape[1], middle), nn.GELU(), nn.Linear(middle, labels.shape[1]))
    network.to(hidden.device)
    draw = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(network.parameters(), lr=LR)
    steps = epochs * math.ceil(len(hidden) / BATCH)
    rate = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(epochs):
        for part in torch.randperm(len(hidden), generator=draw).to(hidden.device).split(BATCH):  # type: ignore[no-untyped-call]
            loss = F.mse_loss(network(hidden[part].float()), (labels[part] - mean) / scale)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(network.parameters(), CLIP)
            optimizer.step()
            rate.step()
    parts = [p.detach() for p in network.parameters()]
    return GeluScore(parts[0], parts[1], parts[2] * scale[:, None], parts[3] * scale + mean)


@dataclass
class Explained:
    """R2 of each KV head's predictions over many texts: 1 - residual / deviation from the head's own mean."""

    _labels: list[Tensor] = field(default_factory=list)
    _residuals: list[Tensor] = field(default_factory=list)

    def add(self, network: HiddenNetwork, hidden: Tensor, labels: Tensor) -> None:
        """Count the samples of a text: hidden states (n, width), labels (n, KV heads)."""
        self._labels.append(labels)
        self._residuals.append(labels - network.raw(hidden.float()).float())

    def r2(self) -> list[float]:
        """One number per KV head."""
        labels, residuals = torch.cat(self._labels).double(), torch.cat(self._residuals).double()
        deviation = (labels - labels.mean(0)).square().sum(0)
        found: list[float] = (1 - residuals.square().sum(0) / deviation).tolist()
        return found
