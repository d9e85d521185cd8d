"""Softmax with a sink, logits and groups of query heads, as the ops in plain torch compute them."""

from __future__ import annotations

import torch
from torch import Tensor

from millpond.kernels.decode_rules import Reduce

INF = float("inf")


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which numbers of `dtype` are computed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def softmax_with_sink(logits: Tensor, visible: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return probabilities and log-sum-exp over the last axis.

    `sink` (broadcastable, one column) enters the denominator.
    """
    logits = logits.masked_fill(~visible, -INF)
    columns = logits if sink is None else torch.cat([logits, sink.expand(*logits.shape[:-1], 1)], -1)
    lse = torch.logsumexp(columns, -1)
    return torch.exp(logits - lse.masked_fill(lse == -INF, 0.0)[..., None]), lse


def soft_cap(logits: Tensor, softcap: float) -> Tensor:
    return softcap * torch.tanh(logits / softcap) if softcap else logits


def with_masses(logits: Tensor, log_masses: Tensor | None) -> Tensor:
    """Return logits (Hkv, group, Q, N) plus log masses (Hkv or 1, n) of the first n columns."""
    if log_masses is None:
        return logits
    bias = log_masses.to(logits.dtype)[:, None, None]
    return logits + torch.nn.functional.pad(bias, (0, logits.shape[-1] - bias.shape[-1]))


def reduce_group(p: Tensor, how: Reduce, dim: int) -> Tensor:
    """Return one number per entry for the query heads of a group, on axis `dim`."""
    if how is Reduce.MAX:
        return p.amax(dim)
    return p.mean(dim) if how is Reduce.MEAN else p.sum(dim)


def lse_merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Return attention over two disjoint sets from the attention over each.

    Args:
        out_a: (..., D).
        lse_a: (...) float32, -inf where the set is empty.
        out_b: (..., D).
        lse_b: (...) float32, -inf where the set is empty.

    Returns:
        out (..., D), lse (...): out = sum_i out_i exp(lse_i - lse), lse = log(exp(lse_a) + exp(lse_b)).
    """
    lse = torch.logaddexp(lse_a, lse_b)
    finite = lse.masked_fill(lse == -INF, 0.0)
    weight_a, weight_b = torch.exp(lse_a - finite)[..., None], torch.exp(lse_b - finite)[..., None]
    return (out_a * weight_a + out_b * weight_b).to(out_a.dtype), lse
