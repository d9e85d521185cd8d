"""Sums over the queries of forward passes: how much attention feels an error in a layer's keys and values."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from millpond.cache.types import RotaryEmbedding
from millpond.codec.transform.exact_tokens import QUERY_STEP, SINKS, attention_per_query, attention_rows, most_attended
from millpond.kernels.args import AttentionShape

#: Of the queries, every so many adds to the metric, and to which entries it looks at least this far back.
STEP, NEAREST = 8, 64
#: Entries that are drawn of a query for the metric of keys.
DRAWN = 4
#: Tokens of all windows whose numbers are held for levels and distortions, at most.
MOST_SAMPLES = 6144


@dataclass(slots=True, eq=False)
class LayerMoments:
    """Sums of one layer over windows of tokens, on the CPU, most of them in float64.

    Attributes:
        queries: () queries that were looked at.
        together: (Hq, Hq) sums over queries and entries of the products of two heads' attention.
        keys: (Hkv, D, D) sums of the metric of keys, before it is divided by the residual stream.
        tokens: () coded tokens.
        sums: (d_key + d_value,) their sums, keys before RoPE and then values.
        key_products: (d_key, d_key) products of their keys.
        value_products: (d_value, d_value) products of their values.
        samples: (n, d_key + d_value) float32, some of them.
        attention: (tokens,) float32, attention per query of all tokens behind the sinks.
        residuals: (windows,) the median squared length of the residual stream.
    """

    queries: Tensor
    together: Tensor
    keys: Tensor
    tokens: Tensor
    sums: Tensor
    key_products: Tensor
    value_products: Tensor
    samples: Tensor
    attention: Tensor
    residuals: Tensor

    @classmethod
    def empty(cls, n_heads: int, n_kv_heads: int, key_dim: int, value_dim: int) -> LayerMoments:
        """Return the sums of nothing."""
        d_key, d_value = n_kv_heads * key_dim, n_kv_heads * value_dim

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64)

        return cls(
            zeros(),
            zeros(n_heads, n_heads),
            zeros(n_kv_heads, key_dim, key_dim),
            zeros(),
            zeros(d_key + d_value),
            zeros(d_key, d_key),
            zeros(d_value, d_value),
            torch.zeros(0, d_key + d_value),
            torch.zeros(0),
            zeros(0),
        )

    def tensors(self) -> dict[str, Tensor]:
        """Return all sums by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True, slots=True)
class LayerPass:
    """One layer's part of a forward pass over one window.

    Attributes:
        q: (Hq, n, D) queries after RoPE.
        k: (Hkv, n, D) keys after RoPE.
        v: (Hkv, n, V) values.
        shape: Settings of the attention.
        rotary: Rotation of the layer; None if it has none.
        maps: (Hq, V, hidden) output projection by query head.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    shape: AttentionShape
    rotary: RotaryEmbedding | None
    maps: Tensor


def add_pass(moments: LayerMoments, layer: LayerPass, generator: torch.Generator, samples: int) -> None:
    """Add one window to the sums of a layer.

    Args:
        moments: Sums; changed.
        layer: The layer's part of the pass.
        generator: Generator of the entries that are drawn, on the CPU.
        samples: Tokens whose numbers are held.
    """
    coded = _coded(moments, layer)
    _add_metric(moments, layer, coded, generator)
    _add_tokens(moments, layer, coded, samples)


def _coded(moments: LayerMoments, layer: LayerPass) -> Tensor:
    """Return which tokens would be coded, (n,) bool; adds the attention of all to the sums.

    Sinks and the most attended tokens are exact.
    """
    n = layer.k.shape[1]
    at = torch.arange(QUERY_STEP - 1, n, QUERY_STEP, device=layer.k.device)
    by_unit = attention_per_query(layer.q[:, at], at, layer.k, layer.shape)[SINKS:]
    whole = attention_per_query(layer.q[:, at], at, layer.k, layer.shape, n)[SINKS:]
    moments.attention = torch.cat([moments.attention, by_unit.cpu()])
    coded = torch.zeros(n, dtype=torch.bool, device=layer.k.device)
    coded[SINKS:] = ~(most_attended(by_unit) | most_attended(whole))
    return coded


def _add_metric(moments: LayerMoments, layer: LayerPass, coded: Tensor, generator: torch.Generator) -> None:
    """Add the sums over queries i and coded entries t of the metrics of keys and values.

    Values: sum_t a_h,it a_g,it. Keys: sum_t a_it^2 |W_h (v_t - o_i)|^2 q~ q~', q~ the query in the frame of t. Exact
    tokens get much of the attention: with them the metric would weigh errors that no token has.
    """
    n, n_kv_heads = layer.k.shape[1], len(layer.k)
    at = torch.arange(STEP - 1, n, STEP, device=layer.k.device)
    at = at[at >= SINKS + NEAREST]
    if not len(at):
        return
    q, v, maps = layer.q[:, at].float(), layer.v.float(), layer.maps.float()
    attention = attention_rows(q, at, layer.k, layer.shape)
    group = len(q) // n_kv_heads
    values = v.repeat_interleave(group, 0)
    outputs = attention @ values
    behind = at[:, None] - torch.arange(n, device=at.device)
    far = (behind >= NEAREST) & coded
    weights = attention * far
    flat = weights.flatten(1).double()
    moments.queries += len(at)
    moments.together += (flat @ flat.T).cpu()
    gram = maps @ maps.transpose(1, 2)
    mapped = values @ gram
    lengths = (mapped * values).sum(-1)[:, None] - 2 * outputs @ mapped.transpose(1, 2)
    lengths = lengths + ((outputs @ gram) * outputs).sum(-1, keepdim=True)
    cost = weights.square() * lengths.clamp(min=0)
    if layer.shape.softcap:  # the slope of c tanh(l / c)
        logits = q.view(n_kv_heads, -1, q.shape[2]) @ layer.k.float().transpose(1, 2) * layer.shape.scale
        cost = cost * (1 - torch.tanh(logits.view(cost.shape) / layer.shape.softcap).square()).square()
    total = cost.sum(-1)
    weighs = total > 0
    if not bool(weighs.any()):
        return
    drawn = torch.multinomial(cost[weighs].cpu(), DRAWN, replacement=True, generator=generator).to(at.device)
    asking = q[weighs].repeat_interleave(DRAWN, 0)
    turned = _into_frame(asking, drawn.flatten(), layer.rotary).double()
    turned *= (total[weighs] / DRAWN).sqrt().double().repeat_interleave(DRAWN)[:, None]
    head = torch.arange(len(q), device=at.device)[:, None].expand(weighs.shape)[weighs] // group
    head = head.repeat_interleave(DRAWN)
    for index in range(n_kv_heads):
        own = turned[head == index]
        moments.keys[index] += (own.T @ own).cpu() * layer.shape.scale**2


def _into_frame(q: Tensor, positions: Tensor, rotary: RotaryEmbedding | None) -> Tensor:
    """Return rotated queries (n, D) by the transposed rotation of keys at some positions (n,)."""
    if rotary is None:
        return q
    back = rotary.rotate(q[None, None], positions[None], inverse=True)[0, 0]
    units = torch.eye(q.shape[1], device=q.device)[None, None]
    lengths = rotary.rotate(units, torch.zeros(1, q.shape[1], dtype=torch.long, device=q.device))[0, 0]
    return back * lengths.square().sum(-1)  # scaled rotations (YaRN) lengthen: their transpose is not their inverse


def _add_tokens(moments: LayerMoments, layer: LayerPass, coded: Tensor, samples: int) -> None:
    """Add the keys before RoPE and the values of the coded tokens."""
    positions = torch.arange(layer.k.shape[1], device=layer.k.device)
    keys = layer.k.float()
    if layer.rotary is not None:
        keys = layer.rotary.rotate(layer.k[None].float(), positions[None], inverse=True)[0]
    numbers = torch.cat([t.float().transpose(0, 1).flatten(1) for t in (keys, layer.v)], 1)[coded].cpu()
    d_key = len(moments.key_products)
    wide = numbers.double()
    moments.tokens += len(numbers)
    moments.sums += wide.sum(0)
    moments.key_products += wide[:, :d_key].T @ wide[:, :d_key]
    moments.value_products += wide[:, d_key:].T @ wide[:, d_key:]
    moments.samples = torch.cat([moments.samples, numbers[:: -(-len(numbers) // max(samples, 1))]])


def metric_of_values(moments: LayerMoments, maps: Tensor, n_kv_heads: int) -> Tensor:
    """Return the metric of values: sum over heads of W_h W_g' A_hg / X2, (d, d) float64.

    Args:
        moments: Sums of the layer.
        maps: (Hq, V, hidden) output projection by query head.
        n_kv_heads: KV heads.
    """
    n_heads, dim, _ = maps.shape
    flat = maps.double().cpu().flatten(0, 1)
    products = (flat @ flat.T).view(n_heads, dim, n_heads, dim) * moments.together[:, None, :, None]
    group = n_heads // n_kv_heads
    by_kv_head = products.view(n_kv_heads, group, dim, n_kv_heads, group, dim).sum((1, 4))
    return by_kv_head.reshape(n_kv_heads * dim, -1) / _divisor(moments)


def metric_of_keys(moments: LayerMoments) -> Tensor:
    """Return the metric of keys, a block for each KV head, (d, d) float64."""
    heads, dim, _ = moments.keys.shape
    metric = moments.keys.new_zeros((heads, dim, heads, dim))
    index = torch.arange(heads)
    metric[index, :, index] = moments.keys
    return metric.view(heads * dim, -1) / _divisor(moments)


def _divisor(moments: LayerMoments) -> Tensor:
    return moments.queries.clamp(min=1) * moments.residuals.mean().clamp(min=torch.finfo(torch.float32).tiny)
