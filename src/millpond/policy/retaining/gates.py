"""Gates: one small network per layer, from a token and the text before it to whether each KV head keeps its entry.

Attention-Gate (Zeng et al., 2024, arXiv:2410.12876). The input is the token's query, key and value before RoPE, as for
retaining heads: linear maps of the layer's normed input, which hold all of it where they have as many numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from millpond.errors import CacheMismatchError
from millpond.kernels.linear import linear
from millpond.policy.retaining.networks import TrainedNetworks, rounded

#: Newest positions that stay whatever the gate says, and first ones: in training and by default.
WINDOW, SINKS = 16, 4
#: The fact of a file that says how its gates look at a prompt: causal, or global.
ATTENTION = "attention"
#: What a gate remembers of the text is stored in this type.
CONTEXT_DTYPE = torch.bfloat16


class GateInput(NamedTuple):
    """What the narrow attention of a gate makes of tokens: queries (heads, n, width), a key and a value (n, width)."""

    queries: Tensor
    keys: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class LayerGate:
    """The network of one layer: p = sigmoid(W2 SiLU(W1 [x; u] + b1) + b2), u = attention of narrow heads over x.

    x = [q; k; v] of a token before RoPE. u_i = softmax_{j <= i}(Wq x_i . Wk x_j / sqrt(width)) Wv x_j for each of the
    gate's heads, which share their keys and values. Where the gate is not causal, the j of a prompt are all its tokens.

    Attributes:
        wq: (heads * width, inputs). wk, wv: (width, inputs). w1: (hidden, inputs + heads * width). b1: (hidden,).
        w2: (KV heads, hidden). b2: (KV heads,).
        causal: a token looks at those before it alone, also while its prompt is read.
    """

    PARTS: ClassVar[tuple[str, ...]] = ("wq", "wk", "wv", "w1", "b1", "w2", "b2")

    wq: Tensor
    wk: Tensor
    wv: Tensor
    w1: Tensor
    b1: Tensor
    w2: Tensor
    b2: Tensor
    causal: bool = True

    @property
    def width(self) -> int:
        """Numbers of a key, and of a value, that the gate remembers of each token."""
        return len(self.wk)

    def take(self, features: Tensor) -> GateInput:
        """Queries, keys and values of features (n, inputs)."""
        x = features.to(self.wq)
        queries = linear(x, self.wq).view(len(x), -1, self.width).transpose(0, 1)
        return GateInput(queries, linear(x, self.wk), linear(x, self.wv))

    def logits(self, features: Tensor, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """(KV heads, n): how surely each KV head keeps the tokens; arguments as of `hidden`."""
        return F.linear(self.hidden(features, queries, keys, values), self.w2, self.b2).T

    def hidden(self, features: Tensor, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """(n, hidden) in the dtype of `w2`: SiLU(W1 [x; u] + b1) of tokens.

        Args:
            features: (n, inputs), of the newest n of N tokens. queries: (heads, n, width), theirs. keys, values:
                (N, width), of all tokens so far. Tokens that nothing stands before (n = N) are a prompt.
        """
        (n_heads, n, _), total = queries.shape, len(keys)
        k, v = (part.to(queries.dtype).expand(n_heads, -1, -1) for part in (keys, values))
        mask = None
        if 1 < n < total:
            places = torch.arange(total, device=queries.device)
            mask = places <= places[total - n :, None]
        # of four dimensions: of three, torch makes the whole (heads, n, N) matrix on a CPU
        q, k, v = queries[None], k[None], v[None]
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=self.causal and n == total)[0]
        both = torch.cat([features.to(self.w1), seen.transpose(0, 1).flatten(1)], -1)
        return F.silu(linear(both, self.w1, self.b1).to(self.w2))

    def to(self, device: torch.device, dtype: torch.dtype = torch.float32) -> LayerGate:
        """See `LayerNetwork.to`."""
        dtypes = {"w2": torch.float32, "b2": torch.float32}
        parts = {part: getattr(self, part).to(device, dtypes.get(part, dtype)) for part in self.PARTS}
        return LayerGate(**parts, causal=self.causal)

    def check(self, layer: int, inputs: int, n_kv_heads: int) -> None:
        """See `LayerNetwork.check`."""
        if inputs != self.wk.shape[1] or n_kv_heads != len(self.b2):
            raise CacheMismatchError(
                f"layer {layer} gives {inputs} numbers of a token and has {n_kv_heads} KV heads; this gate takes "
                f"{self.wk.shape[1]} and decides for {len(self.b2)}: take that of this model"
            )


class Gates(TrainedNetworks[LayerGate]):
    """The gates of a model; facts: data, steps, seed, target, attention (causal or global)."""

    __slots__ = ()

    @property
    def causal(self) -> bool:
        """Whether a flag depends on the text before it alone, so that it does not matter where a prompt is cut."""
        return all(layer.causal for layer in self.layers)


def kept_probability(logits: Tensor) -> Tensor:
    """The p of logits of any shape, in `SCORE_DIGITS` digits: the score that is stored with an entry."""
    return rounded(logits.float().sigmoid())


def default_shape(hidden: int) -> tuple[int, int]:
    """Narrow heads of a gate and their width, for a model of this hidden size."""
    return 4, 8 if hidden < 512 else 16
