"""Trained networks of a model, one per attention layer: gates (Attention-Gate) and retaining heads (Locret)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import ClassVar, Generic, NamedTuple, Protocol, Self, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from millpond.errors import CacheMismatchError, OptionError
from millpond.kernels.linear import has_products, linear
from millpond.policy.trained.adapter import Adapter

#: Binary digits of a score behind the point. Rounding moves a float32 product by its last few digits, and how many
#: tokens were multiplied at once would decide between entries that are equal but for that.
SCORE_DIGITS = 14


class LayerNetwork(Protocol):
    """Network of one layer, as tensors under the names of its parts."""

    #: Names of its tensors, in the order in which it is made of them.
    PARTS: ClassVar[tuple[str, ...]]

    def to(self, device: torch.device, dtype: torch.dtype = torch.float32) -> Self:
        """Return the network on a device, its factors of features in `dtype`, the rest in float32."""
        ...

    def check(self, layer: int, inputs: int, n_kv_heads: int) -> None:
        """Check the numbers that a layer gives of a token, and its KV heads.

        Raises:
            CacheMismatchError: `layer` gives other numbers of a token than it takes, or has other KV heads.
        """
        ...


L = TypeVar("L", bound=LayerNetwork)


@dataclass(frozen=True, slots=True, eq=False)
class TrainedNetworks(Generic[L]):
    """Networks of a model that score its entries.

    Attributes:
        layers: Networks, one per attention layer.
        model: Mark that identifies the model.
        name: Class of the model, for people.
        facts: Facts of the training: data, steps, seed ...
        digest: Digest of all numbers; equal if the scores are.
    """

    layers: Sequence[L]
    model: str
    name: str
    facts: Mapping[str, str] = field(default_factory=dict)
    digest: str = field(init=False, default="")
    _placed: dict[tuple[int, torch.device, torch.dtype], L] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        digest = hashlib.blake2b(digest_size=16)
        for number in self._numbers():
            digest.update(number.detach().float().cpu().contiguous().numpy().tobytes())
        object.__setattr__(self, "digest", digest.hexdigest())

    def _numbers(self) -> Iterator[Tensor]:
        """Return all tensors that decide the scores."""
        return (getattr(layer, part) for layer in self.layers for part in layer.PARTS)

    def at(self, layer: int, features: Tensor, n_kv_heads: int) -> L:
        """Return the network of a layer on the device of its features (..., inputs).

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
        network = self._placed[place]
        network.check(layer, features.shape[-1], n_kv_heads)
        return network


def features_of(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return (B, n, inputs): query, key and value of each token, all heads side by side.

    bfloat16 if they are, else float32.
    """
    dtype = torch.bfloat16 if q.dtype is k.dtype is v.dtype is torch.bfloat16 else torch.float32
    return torch.cat([part.to(dtype).transpose(1, 2).flatten(2) for part in (q, k, v)], -1)


def rounded(score: Tensor) -> Tensor:
    """Return `score` rounded to SCORE_DIGITS binary digits after the point."""
    rounded: Tensor = (score * 2**SCORE_DIGITS).round() / 2**SCORE_DIGITS
    return rounded


#: Newest positions that stay whatever the gate says, and first ones: in training and by default.
WINDOW, SINKS = 16, 4
#: The fact of a file that says how its gates look at a prompt: causal, or global.
ATTENTION = "attention"
#: The fact of a file that says where the flags of its gates acted in training: prompt, or end (also where it is not
#: there).
ACTS = "acts"
#: What a gate remembers of the text is stored in this type.
CONTEXT_DTYPE = torch.bfloat16


class GateInput(NamedTuple):
    """Input of a gate's attention: queries (heads, n, width), a key and a value (n, width)."""

    queries: Tensor
    keys: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class LayerGate:
    """Gate of one layer: p = sigmoid(W2 SiLU(W1 [x; u] + b1) + b2).

    u = attention of narrow heads over x, the [q; k; v] of a token before RoPE. u_i = softmax_{j <= i}(Wq x_i . Wk x_j /
    sqrt(width)) Wv x_j for each of the gate's heads, which share their keys and values. If the gate is not causal, the
    j of a prompt are all its tokens.

    Attributes:
        wq: (heads * width, inputs).
        wk: (width, inputs).
        wv: (width, inputs).
        w1: (hidden, inputs + heads * width).
        b1: (hidden,).
        w2: (KV heads, hidden).
        b2: (KV heads,).
        causal: A token sees only those before it, also while its prompt is read.
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
        """Numbers of a key, and of a value, that the gate stores of each token."""
        return len(self.wk)

    def take(self, features: Tensor) -> GateInput:
        """Return queries, keys and values of features (n, inputs)."""
        x = features.to(self.wq)
        queries = linear(x, self.wq).view(len(x), -1, self.width).transpose(0, 1)
        return GateInput(queries, linear(x, self.wk), linear(x, self.wv))

    def logits(self, features: Tensor, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Return (KV heads, n) logits of keeping the tokens; arguments as in `hidden`."""
        return F.linear(self.hidden(features, queries, keys, values), self.w2, self.b2).T

    def hidden(self, features: Tensor, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Return (n, hidden) in the dtype of `w2`: SiLU(W1 [x; u] + b1) of tokens.

        Args:
            features: (n, inputs), of the newest n of N tokens.
            queries: (heads, n, width), of the same n tokens.
            keys: (N, width), of all tokens so far. If n = N, the tokens are a prompt.
            values: (N, width), of all tokens so far.
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


@dataclass(frozen=True, slots=True, eq=False)
class Gates(TrainedNetworks[LayerGate]):
    """Gates of a model; facts: data, steps, seed, target, attention (causal or global), acts.

    Attributes:
        adapter: What was trained beside them, and has to act where they do; None: the model as it is.
    """

    adapter: Adapter | None = field(default=None, kw_only=True)

    def _numbers(self) -> Iterator[Tensor]:
        parts = [] if self.adapter is None else self.adapter.parts()
        return chain(TrainedNetworks._numbers(self), (matrix for _, matrix in parts))

    @property
    def causal(self) -> bool:
        """Whether a flag depends only on earlier text, so that a prompt may be cut anywhere."""
        return all(layer.causal for layer in self.layers)


def kept_probability(logits: Tensor) -> Tensor:
    """Return the p of logits of any shape, in `SCORE_DIGITS` digits, as stored with an entry."""
    return rounded(logits.float().sigmoid())


def default_shape(hidden: int) -> tuple[int, int]:
    """Return the number of narrow heads of a gate and their width, for a hidden size."""
    return 4, 8 if hidden < 512 else 16


#: Steps between the quantiles of a head's raw scores.
QUANTILE_STEPS = 256
#: Labels of training, log-probabilities, lie between these; see `RetainingHeads.expecting`.
LABELS_FROM, LABELS_TO = -12.0, 0.0
#: Hidden sizes from which a model counts as large.
LARGE = 512


@dataclass(frozen=True, slots=True, eq=False)
class LayerHeads:
    """Retaining head of one layer: s = W2 SiLU(W1 [q; k; v] + b1) + b2.

    Attributes:
        w1: (width, inputs).
        b1: (width,).
        w2: (KV heads, width).
        b2: (KV heads,).
        quantiles: (KV heads, QUANTILE_STEPS + 1) float32, ascending: quantiles of the raw scores on training texts.
    """

    PARTS: ClassVar[tuple[str, ...]] = ("w1", "b1", "w2", "b2", "quantiles")

    w1: Tensor
    b1: Tensor
    w2: Tensor
    b2: Tensor
    quantiles: Tensor

    def raw(self, features: Tensor) -> Tensor:
        """Return (n, KV heads) in the dtype of `w2`: raw scores of features (n, inputs)."""
        return F.linear(F.silu(linear(features.to(self.w1), self.w1, self.b1).to(self.w2)), self.w2, self.b2)

    def scores(self, features: Tensor) -> Tensor:
        """Return (KV heads, n) float32: the rank of each raw score among those of its head.

        It is 0 to 1 on texts as in training. Raw scores of different heads do not compare; these do. Values outside the
        quantiles continue below 0 and above 1.
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
    """Retaining heads of a model; facts: data, steps, seed, label, chunks."""

    __slots__ = ()

    def scores(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return (B, KV heads, n) float32: the scores of new tokens.

        Args:
            layer: Index of the attention layer.
            q: (B, query heads, n, key_dim), before RoPE.
            k: (B, KV heads, n, key_dim), before RoPE.
            v: (B, KV heads, n, value_dim).

        Raises:
            CacheMismatchError: the heads are of a model of another shape.
        """
        features = features_of(q, k, v)
        heads = self.at(layer, features, k.shape[1])
        batch, n = features.shape[:2]
        return heads.scores(features.flatten(0, 1)).view(-1, batch, n).transpose(0, 1)

    def expecting(self) -> RetainingHeads:
        """Return the networks with scores that are the labels they expect, one unit for all heads.

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
    """Return the width of the networks for a hidden size; the paper's for large ones.

    1,024 adds 2.9 % to the weights of a layer of Llama 3.1 8B.
    """
    return 2 * hidden if hidden < LARGE else 1024


def as_quantiles(raw: Tensor, quantiles: Tensor) -> Tensor:
    """Return (H, n): the ranks of raw scores (H, n) among quantiles (H, steps + 1).

    They are linear between quantiles, in SCORE_DIGITS digits. Outside of them a score continues in units of their whole
    range.
    """
    steps = quantiles.shape[1] - 1
    above = torch.searchsorted(quantiles, raw.contiguous(), right=True).clamp(1, steps)
    low, high = quantiles.gather(1, above - 1), quantiles.gather(1, above)
    inside = ((raw - low) / (high - low).clamp(min=1e-12)).clamp(0, 1)
    lowest, highest = quantiles[:, :1], quantiles[:, -1:]
    outside = ((raw - highest).clamp(min=0) - (lowest - raw).clamp(min=0)) / (highest - lowest).clamp(min=1e-6)
    return rounded((above - 1 + inside) / steps + outside)


def quantiles_of(raw: Tensor) -> Tensor:
    """Return (H, QUANTILE_STEPS + 1) float32, ascending: the quantiles of raw scores (H, n)."""
    ordered = raw.float().sort(1).values
    places = torch.linspace(0, raw.shape[1] - 1, QUANTILE_STEPS + 1, device=raw.device).round().long()
    return ordered[:, places].contiguous()
