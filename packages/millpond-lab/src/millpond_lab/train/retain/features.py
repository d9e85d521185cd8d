"""Features and labels of retaining heads: those of each layer, from forward passes of the frozen model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from millpond.errors import DataError, OptionError, UnsupportedModelError
from millpond.hf.cache import MillpondCache
from millpond.hf.compress import compress
from millpond.hf.model_profile import ModelProfile
from millpond.hf.model_support import supported
from millpond.hf.signals.rotary import ModelRotation, layer_rotations
from millpond.kernels.args import AttentionShape
from millpond.models.cache_argument import cache_argument
from millpond.policy.policy import Policy
from millpond.policy.trained.networks import features_of

#: log_prob: the largest log-probability that a later query gives the entry. logit: the largest logit before the
#: softmax, as in the paper's code.
Label = Literal["log_prob", "logit"]
#: The least label of `log_prob`: entries that no query attends to are alike below it.
LEAST_LOG_PROB = -12.0
#: Queries whose logits are in memory at a time.
BLOCK = 64


def labels_of(q: Tensor, k: Tensor, shape: AttentionShape, label: Label = "log_prob", block: int = BLOCK) -> Tensor:
    """The labels of the entries before the queries: max over queries and over the query heads of each KV head.

    Args:
        q: (query heads, m, key_dim), of the last m positions. k: (KV heads, N, key_dim), N > m. Both after RoPE.
        shape: what attention does besides softmax(q k / sqrt d).
        block: queries of which logits are made at a time; the result does not depend on it.

    Returns:
        (KV heads, N - m) float32.

    Raises:
        OptionError: no such label.
    """
    if label not in ("log_prob", "logit"):
        raise OptionError(f"label={label!r} must be log_prob or logit")
    n_heads, m, _ = q.shape
    n_kv_heads, n, _ = k.shape
    first, keys = n - m, k.float().transpose(1, 2)[:, None]  # (KV heads, 1, key_dim, N)
    grouped = q.float().view(n_kv_heads, n_heads // n_kv_heads, m, -1)
    places = torch.arange(n, device=k.device)
    best = torch.full((n_kv_heads, first), -torch.inf, device=k.device)
    for begin in range(0, m, block):
        at = places[first + begin : min(first + begin + block, n), None]
        logits = grouped[:, :, begin : begin + block] @ keys * shape.scale
        if shape.softcap:
            logits = shape.softcap * torch.tanh(logits / shape.softcap)
        seen = places <= at
        if shape.window:
            seen &= at - places < shape.window
        logits = logits.masked_fill(~seen, -torch.inf)  # (KV heads, group, block, N)
        if label == "log_prob":
            logits = logits - _log_sum(logits, shape)
        best = best.maximum(logits[..., :first].amax((1, 2)))
    if label == "log_prob":
        return best.clamp(min=LEAST_LOG_PROB)
    shown = torch.where(best.isinf(), torch.inf, best).amin()
    return torch.where(best.isinf(), shown, best)  # hidden by a window: like the least that is seen


def _log_sum(logits: Tensor, shape: AttentionShape) -> Tensor:
    """(KV heads, group, block, 1): the log of the sum that the softmax divides by."""
    total = logits.logsumexp(-1, keepdim=True)
    if shape.sink_logits is None:
        return total
    return torch.logaddexp(total, shape.sink_logits.to(logits).view(*logits.shape[:2], 1, 1))


@dataclass(frozen=True, slots=True)
class HeadSizes:
    """Numbers of one layer: that a token gives its network, and KV heads that it scores."""

    inputs: int
    n_kv_heads: int


@dataclass(slots=True)
class LayerText:
    """What one layer made of a text, for the entries before its queries.

    Attributes:
        features: (n, inputs) in the model's dtype. labels: (KV heads, n) float32.
    """

    features: Tensor
    labels: Tensor


class LayerPrompt(NamedTuple):
    """What one layer made of a prompt of n tokens that it read in full."""

    features: Tensor  #: (n, inputs)
    keys: Tensor  #: (KV heads, n, key_dim) float32, after RoPE
    values: Tensor  #: (KV heads, n, value_dim) float32
    shape: AttentionShape


class ReadPrompt(NamedTuple):
    """A prompt as the model read it in full."""

    layers: list[LayerPrompt]
    logits: Tensor  #: (m, vocabulary) that the model gives the m tokens behind it


@dataclass
class TextReader:
    """Forward passes of a frozen model over single texts.

    Attributes:
        model: what is read with. label: see `labels_of`.
    """

    model: PreTrainedModel
    label: Label = "log_prob"
    _rotations: Sequence[ModelRotation | None] = field(init=False)

    def __post_init__(self) -> None:
        profile = supported(self.model)
        self._rotations = _rotations_of(profile)

    def sizes(self) -> list[HeadSizes]:
        """Those of every layer, learned from two tokens."""
        return [size for size, _ in self._layers]

    @property
    def shapes(self) -> list[AttentionShape]:
        """What the attention of every layer does besides softmax(q k / sqrt d), learned from two tokens."""
        return [shape for _, shape in self._layers]

    @cached_property
    def _layers(self) -> list[tuple[HeadSizes, AttentionShape]]:
        found: dict[int, tuple[HeadSizes, AttentionShape]] = {}

        def look(layer: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, shape: AttentionShape) -> None:
            found[layer] = HeadSizes(features_of(q, k, v).shape[-1], k.shape[1]), shape

        with _cache(self.model, None) as cache:
            cache.watch(look)
            self._run(cache, torch.tensor([1, 2]), 2)
        return [found[layer] for layer in sorted(found)]

    def read(self, ids: Tensor, begin: int, policy: Policy | None = None, budget: int = 0) -> list[LayerText]:
        """Features and labels of the tokens before `begin`, by the queries of those from there on.

        Args:
            ids: (N,) of one text. begin: first token of its questions.
            policy: evicts to `budget` entries per KV head while the text is read, and features are computed from that
                reading; labels are those of full attention. None: features are of full attention too.

        Raises:
            DataError: no token before or behind `begin`.
        """
        _check(ids, begin)
        texts: dict[int, LayerText] = {}

        def full(layer: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, shape: AttentionShape) -> None:
            labels = labels_of(q[0, :, begin:], k[0], shape, self.label)
            texts[layer] = LayerText(self.features(layer, q, k, v, begin), labels)

        def evicting(layer: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, shape: AttentionShape) -> None:
            texts[layer].features = self.features(layer, q, k, v, begin)

        with _cache(self.model, None) as cache:
            cache.watch(full)
            self._run(cache, ids, len(ids))
        if policy is not None:
            with _cache(self.model, policy, budget) as cache:
                cache.watch(evicting)
                self._run(cache, ids[:begin], begin)
        return [texts[layer] for layer in sorted(texts)]

    def read_prompt(self, ids: Tensor, begin: int) -> ReadPrompt:
        """Entries of the tokens before `begin`, and the predictions from there on; arguments as of `read`.

        Raises:
            DataError: no token before or behind `begin`.
        """
        _check(ids, begin)
        layers: dict[int, LayerPrompt] = {}

        def look(layer: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, shape: AttentionShape) -> None:
            keys, values = (t[0, :, :begin].float() for t in (k, v))
            layers[layer] = LayerPrompt(self.features(layer, q, k, v, begin), keys, values, shape)

        with _cache(self.model, None) as cache:
            cache.watch(look)
            logits = self._run(cache, ids, len(ids), len(ids) - begin)
        return ReadPrompt([layers[layer] for layer in sorted(layers)], logits)

    def predict(self, ids: Tensor, begin: int) -> Tensor:
        """(m, vocabulary): what the model predicts of the m tokens from `begin` on; as for `read`.

        Raises:
            DataError: no token before or behind `begin`.
        """
        _check(ids, begin)
        with _cache(self.model, None) as cache:
            return self._run(cache, ids, len(ids), len(ids) - begin)

    def features(self, layer: int, q: Tensor, k: Tensor, v: Tensor, begin: int) -> Tensor:
        """(begin, inputs) of the first tokens of one text, given what its layer attends with in one pass."""
        q, k, v = (t[:, :, :begin] for t in (q, k, v))
        rotary = self._rotations[layer]
        if rotary is not None:
            positions = torch.arange(q.shape[2], device=q.device)[None]
            q, k = (rotary.rotate(t, positions, inverse=True).to(t.dtype) for t in (q, k))
        return features_of(q, k, v)[0]

    def _run(self, cache: MillpondCache, ids: Tensor, n: int, last: int = 1) -> Tensor:
        """Logits (last, vocabulary) of the last ones of `n` tokens."""
        keep = {"logits_to_keep": last} if "logits_to_keep" in ModelProfile.of(self.model).arguments else {}
        with torch.no_grad():
            out = self.model(ids[None, :n].to(self.model.device), **cache_argument(cache), use_cache=True, **keep)
        logits: Tensor = out.logits[0, -last:]
        return logits


def _check(ids: Tensor, begin: int) -> None:
    if not 0 < begin < len(ids):
        raise DataError(f"a text of {len(ids)} tokens has no queries from token {begin} on")


def _rotations_of(profile: ModelProfile) -> list[ModelRotation | None]:
    if profile.latent is not None or profile.shared:
        raise UnsupportedModelError(
            f"{profile.name} stores latents (MLA) or shares keys between layers; retaining heads score the keys of "
            "layers that have their own"
        )
    return layer_rotations(profile)


@contextmanager
def _cache(model: PreTrainedModel, policy: Policy | None, budget: int = 0) -> Iterator[MillpondCache]:
    """A cache of the model for one text."""
    made = compress(model, "full") if policy is None else compress(model, policy, budget=budget)
    with made as cache:
        yield cache
