"""Codes whose ranges and outliers are those of a token over all KV heads (KVQuant, arXiv:2401.18079, section 3.4)."""

from __future__ import annotations

import torch
from torch import Tensor

from millpond.kernels.packed import codes, groups
from millpond.kernels.packed.codes import Fixed, Parts
from millpond.kernels.packed.layout import Side, cuts_of


def outer(x: Tensor, n: int) -> Tensor:
    """Return (..., W) bool: the n largest and the n smallest numbers of each token x (..., W)."""
    mask = torch.zeros_like(x, dtype=torch.bool)
    for largest in (True, False) if n else ():
        mask.scatter_(-1, x.topk(min(n, x.shape[-1]), -1, largest=largest).indices, True)
    return mask


def token_range(x: Tensor, outlier: Tensor) -> tuple[Tensor, Tensor]:
    """Return the least and the largest number (..., 1) of each token, outliers left out.

    x, outlier: (..., W).
    """
    low = torch.where(outlier, torch.inf, x).amin(-1, keepdim=True)
    high = torch.where(outlier, -torch.inf, x).amax(-1, keepdim=True)
    none = outlier.all(-1, keepdim=True)
    return torch.where(none, 0.0, low), torch.where(none, 0.0, high)


def encode_across(x: Tensor, side: Side, fixed: Fixed | None, n_heads: int) -> Parts:
    """Return the codes of whole pages x (P, slots, dim).

    Pages of all heads of the same tokens follow one another. Values take zero and scale from the range of their token
    without its outliers; the ranges of keys were calibrated. A page has places for `layout.ROOM` times its even share
    of the outliers. Where a head has more, those nearest to the range are clipped to it; where it has fewer, other
    numbers far out have the rest.

    Raises:
        NumericsError: a number that the format cannot hold.
    """
    groups.check_finite(x)
    x = x.float() + 0.0
    n_pages, slots, dim = x.shape
    if fixed is None:
        tokens = _tokens(x, n_heads)
        outlier = outer(tokens, side.n_outer)
        low, high = token_range(tokens, outlier)
        zeros, scales = (_of_heads(groups.to_half(t), n_heads) for t in ((high + low) / 2, (high - low) / 2))
        y = (x - zeros.float()) * groups.inverse(scales.float())
        parts = Parts(groups.between(y, cuts_of(side).to(y.device)), scales, zeros)
    else:
        scale, zero = fixed
        y = (x - zero) * groups.inverse(scale)
        tokens = _tokens(y, n_heads)
        outlier = outer(tokens, side.n_outer) & (tokens.abs() > 1)
        parts = Parts(groups.between(y, cuts_of(side).to(y.device)))
    if side.n_extra:
        far = y.abs()
        mine = _pages(outlier, n_heads)
        rank = torch.where(mine, far + far.amax() + 1, far).flatten(1)
        chosen = rank.sort(dim=1, descending=True, stable=True).indices[:, : side.n_extra]
        inlier = torch.ones_like(rank, dtype=torch.bool).scatter(1, chosen, False).view(n_pages, slots, dim)
        parts.where, parts.what = codes.beside(x - codes.decode(parts, side, fixed), inlier, side.n_extra)
    return parts


def _tokens(x: Tensor, n_heads: int) -> Tensor:
    """Return pages (P, slots, dim) as tokens (P / n_heads, slots, n_heads * dim)."""
    return x.view(-1, n_heads, *x.shape[1:]).transpose(1, 2).flatten(2)


def _pages(tokens: Tensor, n_heads: int) -> Tensor:
    """Return tokens of `_tokens` as pages again."""
    by_head = tokens.view(*tokens.shape[:2], n_heads, -1).transpose(1, 2)
    return by_head.flatten(0, 1)


def _of_heads(numbers: Tensor, n_heads: int) -> Tensor:
    """Return a number per token (G, slots, 1) for each head, (G * n_heads, slots, 1)."""
    return numbers.repeat_interleave(n_heads, 0)
