"""Gates in training: their flags with a straight-through gradient, and the loss of Attention-Gate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from millpond.policy.trained.networks import LayerGate, LayerHeads
from millpond_lab.train.gate.low_rank import TrainedAdapter

#: What the model's predictions are held to: self, those of the same model with everything kept; text, the text itself.
Teacher = Literal["self", "text"]
#: Logit with which every token is kept at first.
FIRST_BIAS = 2.0


class TrainedGate(nn.Module):
    """The gate of one layer while it is trained: a `LayerGate` whose parts are parameters.

    Attributes:
        adapter: of the layer's projections, trained beside it; None: the model stays as it is.
    """

    def __init__(
        self, inputs: int, hidden: int, n_kv_heads: int, n_heads: int, width: int, causal: bool = True
    ) -> None:
        super().__init__()
        self.causal = causal
        self.adapter: TrainedAdapter | None = None

        def drawn(rows: int, columns: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(rows, columns).uniform_(-1, 1) / columns**0.5)

        self.wq, self.wk, self.wv = drawn(n_heads * width, inputs), drawn(width, inputs), drawn(width, inputs)
        self.w1, self.b1 = drawn(hidden, inputs + n_heads * width), nn.Parameter(torch.zeros(hidden))
        self.w2, self.b2 = drawn(n_kv_heads, hidden), nn.Parameter(torch.full((n_kv_heads,), FIRST_BIAS))

    @property
    def gate(self) -> LayerGate:
        """The gate as it is now."""
        return LayerGate(**{part: getattr(self, part) for part in LayerGate.PARTS}, causal=self.causal)

    def forward(self, features: Tensor) -> Tensor:
        """(KV heads, n) logits of features (n, inputs)."""
        gate = self.gate
        return gate.logits(features, *gate.take(features))

    @torch.no_grad()
    def start_from(self, heads: LayerHeads, target: float) -> None:
        """Begin with what retaining heads say: flags of the `target` share of the tokens with the highest scores.

        heads: of the same width and inputs.
        """
        inputs = heads.w1.shape[1]
        self.w1[:, :inputs], self.w1[:, inputs:] = heads.w1, 0
        self.b1.copy_(heads.b1)
        self.w2.copy_(heads.w2)
        steps = heads.quantiles.shape[1] - 1
        self.b2.copy_(heads.b2 - heads.quantiles[:, round((1 - target) * steps)])

    @torch.no_grad()
    def continue_from(self, gate: LayerGate) -> None:
        """Begin with the numbers of a gate, in its width."""
        for part in LayerGate.PARTS:
            setattr(self, part, nn.Parameter(getattr(gate, part).detach().float().cpu().clone()))


def straight_through(logits: Tensor, pinned: Tensor) -> Tensor:
    """Flags 1[p > 1/2], with the gradient of p = sigmoid(logits); 1 without a gradient where `pinned`.

    Args:
        logits: (KV heads, n). pinned: (n,) bool.
    """
    p = logits.sigmoid()
    flags = (p > 0.5).to(p) + p - p.detach()
    return torch.where(pinned, torch.ones_like(flags), flags)


def pinned_entries(n: int, sinks: int, window: int, device: torch.device) -> Tensor:
    """(n,) bool: the entries of a prompt of n tokens that stay whatever a gate says."""
    places = torch.arange(n, device=device)
    return (places < sinks) | (places >= n - window)


def prediction_loss(logits: Tensor, full: Tensor, ids: Tensor, teacher: Teacher) -> Tensor:
    """How far predictions are from the teacher's, a mean over the later tokens.

    Args:
        logits, full: (m, vocabulary) with what is kept, and with everything. ids: (m,) the later tokens.
        teacher: self is KL(full || kept); text the cross entropy of each next token.
    """
    found = logits.float().log_softmax(-1)
    if teacher == "text":
        return F.nll_loss(found[:-1], ids[1:].to(found.device))
    return F.kl_div(found, full.float().log_softmax(-1), reduction="batchmean", log_target=True)


def gate_loss(predicted: Tensor, flags: list[Tensor], target: float, alpha: float) -> tuple[Tensor, Tensor]:
    """The loss, predicted + alpha |mean flag - target|, and the mean flag.

    flags: (KV heads, n) per layer; the mean is one over all layers, heads and tokens, so that layers may differ.
    """
    kept = torch.cat([layer.flatten() for layer in flags]).mean()
    return predicted + alpha * (kept - target).abs(), kept


#: Of the flags on held-out texts, the share that may change.
CHANGED = 0.001
#: Units that a layer keeps at least; then twice as many, until few enough flags change.
LEAST_UNITS = 8


def pruned(gate: LayerGate, hidden: Sequence[Tensor]) -> LayerGate:
    """The gate with as few units as decide alike: those that move its logits most, the others at their means.

    hidden: (n, units) of each of some texts.
    """
    units = torch.cat(list(hidden))
    flags = (units @ gate.w2.T + gate.b2) > 0
    order = (gate.w2.abs().amax(0) * units.std(0)).argsort(descending=True)
    means = units.mean(0)
    count = LEAST_UNITS
    while count < len(order):
        kept, dropped = order[:count].sort().values, order[count:]
        bias = gate.b2 + gate.w2[:, dropped] @ means[dropped]
        found = (units[:, kept] @ gate.w2[:, kept].T + bias) > 0
        if float((found != flags).float().mean()) <= CHANGED:
            return replace(gate, w1=gate.w1[kept], b1=gate.b1[kept], w2=gate.w2[:, kept], b2=bias)
        count *= 2
    return gate
