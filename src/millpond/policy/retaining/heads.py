"""Retaining heads: one small network per layer, from a token's query, key and value to a score for each KV head.

Locret (Huang et al., 2024, arXiv:2410.01805). The input is taken before RoPE, so a score depends on the text before a
token and not on where it stands, and never changes after it was made.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from millpond.errors import CacheMismatchError, OptionError
from millpond.kernels.linear import linear
from millpond.policy.retaining.networks import TrainedNetworks, features_of, rounded

#: Steps between the quantiles of a head's raw scores.
QUANTILE_STEPS = 256
#: Labels of training, log-probabilities, lie between these; see `RetainingHeads.expecting`.
LABELS_FROM, LABELS_TO = -12.0, 0.0
#: Hidden sizes from which a model counts as large.
LARGE = 512


@dataclass(frozen=True, slots=True, eq=False)
class LayerHeads:
    """The network of one layer: s = W2 SiLU(W1 [q; k; v] + b1) + b2.

    Attributes:
        w1: (width, inputs). b1: (width,). w2: (KV heads, width). b2: (KV heads,).
        quantiles: (KV heads, QUANTILE_STEPS + 1) float32, ascending: of the raw scores on texts of training.
    """

    PARTS: ClassVar[tuple[str, ...]] = ("w1", "b1", "w2", "b2", "quantiles")

    w1: Tensor
    b1: Tensor
    w2: Tensor
    b2: Tensor
    quantiles: Tensor

    def raw(self, features: Tensor) -> Tensor:
        """(n, KV heads) in the dtype of `w2`: raw scores of features (n, inputs), see `features_of`."""
        return F.linear(F.silu(linear(features.to(self.w1), self.w1, self.b1).to(self.w2)), self.w2, self.b2)

    def scores(self, features: Tensor) -> Tensor:
        """(KV heads, n) float32: where each raw score lies among those of its head, 0 to 1 on texts as in training.

        Raw scores of different heads do not compare; these do. Values outside the quantiles go on below 0 and above 1.
        """
        return as_quantiles(self.raw(features).T, self.quantiles)

    def to(self, device: torch.device, dtype: torch.dtype = torch.float32) -> LayerHeads:
        """See `LayerNetwork.to`."""
        return LayerHeads(
            self.w1.to(device, dtype),
            self.b1.to(device, dtype),
            *(getattr(self, part).to(device, torch.float32) for part in self.PARTS[2:]),
        )

    def check(self, layer: int, inputs: int, n_kv_heads: int) -> None:
        """See `LayerNetwork.check`."""
        if inputs != self.w1.shape[1] or n_kv_heads != len(self.b2):
            raise CacheMismatchError(
                f"layer {layer} gives {inputs} numbers of a token and has {n_kv_heads} KV heads; these retaining heads "
                f"take {self.w1.shape[1]} and score {len(self.b2)}: take those of this model"
            )


class RetainingHeads(TrainedNetworks[LayerHeads]):
    """The retaining heads of a model; facts: data, steps, seed, label, chunks."""

    __slots__ = ()

    def scores(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(B, KV heads, n) float32: the scores of new tokens.

        Args:
            q: (B, query heads, n, key_dim). k: (B, KV heads, n, key_dim). v: (B, KV heads, n, value_dim); queries and
                keys before RoPE.

        Raises:
            CacheMismatchError: the heads are of a model of another shape.
        """
        features = features_of(q, k, v)
        heads = self.at(layer, features, k.shape[1])
        batch, n = features.shape[:2]
        return heads.scores(features.flatten(0, 1)).view(-1, batch, n).transpose(0, 1)

    def expecting(self) -> RetainingHeads:
        """The same networks, whose scores are the labels that they expect, one unit for all heads and layers.

        A score is then (label + 12) / 12, so that heads compare by the attention that is expected for an entry.

        Raises:
            OptionError: they were trained on logits, which differ in scale from head to head.
        """
        if self.facts.get("label", "log_prob") != "log_prob":
            raise OptionError(
                f"these heads were trained with --label {self.facts['label']}, whose numbers do not compare between "
                "heads; let heads not compete (compete='no'), or train with --label log_prob"
            )
        steps = torch.linspace(LABELS_FROM, LABELS_TO, QUANTILE_STEPS + 1)
        layers = [replace(heads, quantiles=steps.repeat(len(heads.b2), 1)) for heads in self.layers]
        return RetainingHeads(layers, self.model, self.name, self.facts)


def default_width(hidden: int) -> int:
    """Width of the networks for a model of this hidden size; of large ones the paper's.

    1,024 adds 2.9 % to the weights of a layer of Llama 3.1 8B.
    """
    return 2 * hidden if hidden < LARGE else 1024


def as_quantiles(raw: Tensor, quantiles: Tensor) -> Tensor:
    """(H, n): where raw scores (H, n) lie among quantiles (H, steps + 1), linear between them, in SCORE_DIGITS digits.

    Outside of them a score goes on in units of their whole range.
    """
    steps = quantiles.shape[1] - 1
    above = torch.searchsorted(quantiles, raw.contiguous(), right=True).clamp(1, steps)
    low, high = quantiles.gather(1, above - 1), quantiles.gather(1, above)
    inside = ((raw - low) / (high - low).clamp(min=1e-12)).clamp(0, 1)
    least, most = quantiles[:, :1], quantiles[:, -1:]
    outside = ((raw - most).clamp(min=0) - (least - raw).clamp(min=0)) / (most - least).clamp(min=1e-6)
    return rounded((above - 1 + inside) / steps + outside)


def quantiles_of(raw: Tensor) -> Tensor:
    """(H, QUANTILE_STEPS + 1) float32, ascending: the quantiles of raw scores (H, n)."""
    ordered = raw.float().sort(1).values
    places = torch.linspace(0, raw.shape[1] - 1, QUANTILE_STEPS + 1, device=raw.device).round().long()
    return ordered[:, places].contiguous()
