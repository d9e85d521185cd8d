"""Change of each attention layer's output through eviction, with Ada-KV's bound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from millpond.budget import Budget
from millpond.errors import OptionError, UnsupportedModelError
from millpond.hf.cache import MillpondCache
from millpond.hf.compress import compress
from millpond.hf.model_profile import PROJECTIONS, ModelProfile
from millpond.kernels.eager.softmax import soft_cap, softmax_with_sink
from millpond.models.cache_argument import cache_argument
from millpond.policy.policy import Policy
from millpond_lab.evals.decoding.attention_recorder import AttentionRecorder, RecordedAttention


def output_matrices(model: PreTrainedModel) -> dict[int, Tensor]:
    """{layer: (H, value_dim, hidden size)}, so that head h adds o_h @ W_h to the layer's output.

    Raises:
        UnsupportedModelError: the projection of some layer is not found.
    """
    profile = ModelProfile.of(model)
    places = profile.output_projections.items()
    found = {index: _by_head(getattr(place.module, place.name), profile.n_heads) for index, place in places}
    count = profile.n_layers
    if sorted(found) != list(range(count)):
        raise UnsupportedModelError(
            f"{type(model).__name__}: the output projection was found in {len(found)} of {count} attention layers "
            f"(looked for {', '.join(PROJECTIONS)}), so their losses cannot be computed"
        )
    return found


@torch.no_grad()
def _by_head(linear: nn.Module, n_heads: int) -> Tensor:
    """The map applied to unit vectors: right for every kind of linear layer, however it keeps its weights."""
    weight = next(p for p in linear.parameters() if p.ndim == 2)
    size = int(getattr(linear, "in_features", weight.shape[0]))
    units = torch.eye(size, dtype=weight.dtype, device=weight.device)
    matrix: Tensor = linear(units) - linear(torch.zeros_like(units[:1]))
    return matrix.view(n_heads, size // n_heads, -1)


#: Positions kept: [layer][KV head], as `MillpondCache.positions` tells them.
Kept = Sequence[Sequence[Sequence[int]]]
#: Queries that are worked on at once.
BLOCK = 64


@dataclass(frozen=True, slots=True)
class AttentionLosses:
    """Means over queries, float64; H query heads.

    With o_h and o'_h the output of head h over all entries and over the kept ones, and W_h its part of the output
    projection (Feng et al., arXiv:2407.11550, theorem 3.1):

    Attributes:
        loss: (L, H) ||(o_h - o'_h) W_h||_1.
        evicted: (L, H) the attention that would have gone to evicted entries, 1 - sum_{j kept} A_hj.
        bound: (L, H) 2 C evicted, where C = max_hj ||v_hj W_h||_1 in the layer.
        layer_loss: (L,) ||sum_h (o_h - o'_h) W_h||_1, of the heads together.
    """

    loss: Tensor
    evicted: Tensor
    bound: Tensor
    layer_loss: Tensor

    @property
    def layer_bound(self) -> Tensor:
        """(L,) 2 C (H - sum of kept A): what the theorem holds against `layer_loss`."""
        return self.bound.sum(1)

    def numbers(self) -> dict[str, float]:
        """For a summary: loss and bound of a layer and the evicted share of attention, means over layers."""
        return {
            "attention_loss": float(self.layer_loss.mean()),
            "attention_bound": float(self.layer_bound.mean()),
            "evicted_attention": float(self.evicted.mean()),
        }


def method_losses(
    model: PreTrainedModel,
    tokens: Tensor,
    opening: int,
    method: str | Policy = "h2o",
    budget: str | int | float | Budget | None = None,
    codec: str = "auto",
    **options: Any,
) -> AttentionLosses:
    """The losses that a method causes when it compresses the first `opening` of `tokens` (n,): see `compress`.

    Evicted entries are lost; entries that are stored but not selected by a lookup count as kept.
    """
    with torch.inference_mode(), compress(model, method, budget, codec, **options) as cache:
        model(tokens[None, :opening], **cache_argument(cache), logits_to_keep=1)
        kept = kept_positions(cache)
    return attention_losses(model, tokens, opening, kept)


def kept_positions(cache: MillpondCache, sequence: int = 0) -> list[list[list[int]]]:
    """The positions that a cache holds of one sequence: [layer][KV head]."""
    return [cache.positions(layer, sequence) for layer in cache.entry_layers]


def attention_losses(model: PreTrainedModel, tokens: Tensor, opening: int, kept: Kept) -> AttentionLosses:
    """What the queries after the opening lose where only `kept` is left of the opening.

    The queries, keys and values are those of the full cache, the same for every method. Each query sees the kept
    positions and all from `opening` up to itself, at their true places in the text.

    Args:
        tokens: (n,) ids of one text; the queries are the tokens from `opening` on.
        kept: [layer][KV head] positions.

    Raises:
        OptionError: no token before or after the opening, or `kept` is of another model.
        UnsupportedModelError: the model's output projection, or the keys of its heads, cannot be had.
    """
    if not 0 < opening < len(tokens):
        raise OptionError(f"opening={opening} must leave tokens before and behind it, of {len(tokens)}")
    matrices = output_matrices(model)
    with torch.inference_mode(), compress(model, "full") as cache:
        tap = AttentionRecorder(cache, asking=False)
        model(tokens[None, :opening], **cache_argument(cache), logits_to_keep=1)
        tap.asking = True
        model(tokens[None, opening:], **cache_argument(cache), logits_to_keep=1)
        if len(kept) != len(tap.layers):
            raise OptionError(f"kept tells of {len(kept)} layers, the model has {len(tap.layers)}")
        layers = [
            layer_losses(tap.traffic(layer, 0), matrices[layer], _mask(kept[layer], opening, len(tokens)))
            for layer in tap.layers
        ]
    return AttentionLosses(*(torch.stack(parts) for parts in zip(*layers, strict=True)))


def layer_losses(traffic: RecordedAttention, w: Tensor, keep: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Loss, evicted attention and bound (H,), and the loss of all heads together, of one layer.

    Args:
        w: (H, value_dim, n) the output projection by query heads. keep: (Hkv, N) bool.
    """
    n_kv_heads, group = keep.shape[0], w.shape[0] // keep.shape[0]
    w, keep, m = w.double(), keep.to(w.device), traffic.q.shape[1]
    v = traffic.v.double().repeat_interleave(group, 0)
    c = max(float((v[h] @ w[h]).abs().sum(-1).max()) for h in range(len(w)))
    loss = evicted = w.new_zeros(len(w))
    together = w.new_zeros(())
    for begin in range(0, m, BLOCK):
        p, kept_p = _attention(traffic, keep, begin)  # (H, queries, N)
        moved = torch.stack([(p[h] - kept_p[h]) @ v[h] @ w[h] for h in range(len(w))])
        loss = loss + moved.abs().sum((1, 2))
        together = together + moved.sum(0).abs().sum()
        gone = p.view(n_kv_heads, group, *p.shape[1:]) * ~keep[:, None, None]
        evicted = evicted + gone.sum((2, 3)).flatten()
    return loss / m, evicted / m, 2 * c * evicted / m, together / m


def _attention(traffic: RecordedAttention, keep: Tensor, begin: int) -> tuple[Tensor, Tensor]:
    """Probabilities (H, queries, N) of a block of queries, over all entries and over the kept ones; float64."""
    q, shape = traffic.q[:, begin : begin + BLOCK].double(), traffic.shape
    n_kv_heads, n = traffic.k.shape[:2]
    rows = q.view(n_kv_heads, -1, *q.shape[1:])
    logits = soft_cap(rows @ traffic.k.double()[:, None].transpose(-1, -2) * shape.scale, shape.softcap)
    position = torch.arange(n, device=q.device)
    distance = traffic.first + begin + torch.arange(q.shape[1], device=q.device)[:, None] - position
    visible = (distance >= 0) & (distance < shape.window) if shape.window else distance >= 0
    sink = None if shape.sink_logits is None else shape.sink_logits.double().view(n_kv_heads, -1, 1, 1)
    p, _ = softmax_with_sink(logits, visible, sink)
    kept_p, _ = softmax_with_sink(logits, visible & keep[:, None, None], sink)
    return p.flatten(0, 1), kept_p.flatten(0, 1)


def _mask(kept: Sequence[Sequence[int]], opening: int, n: int) -> Tensor:
    """(Hkv, n) bool: the kept positions, and all after the opening."""
    keep = torch.zeros(len(kept), n, dtype=torch.bool)
    keep[:, opening:] = True
    for head, positions in enumerate(kept):
        keep[head, torch.tensor(list(positions), dtype=torch.long)] = True
    return keep
