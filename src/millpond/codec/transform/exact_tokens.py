"""Tokens that are stored as they are: sinks, the newest, and those that queries attend to most."""

from __future__ import annotations

import torch
from torch import Tensor

from millpond.kernels.args import AttentionShape

#: First tokens of a text that are never coded, and newest ones.
SINKS, NEWEST = 4, 64
#: Of the queries, every so many is asked.
QUERY_STEP = 16
#: Queries that judge a whole text at most, evenly spread; a quarter of these costs half of the KL again.
MOST_QUERIES = 256
#: Tokens of a unit: a token is judged by the queries of its own unit.
UNIT = 256
#: Exact tokens of a unit, and how far behind a token queries are that judge it: nearer ones look at what is near.
UNIT_EXACT, FAR = 3, 32
#: Sampled queries that are looked at together: their logits stay in a processor's cache.
TOGETHER = 16
#: Queries that a token's attention is divided by at least: the last tokens of a unit are seen by few.
LEAST_QUERIES = 4
#: Share of the tokens of a calibration that are exact by attention.
SHARE = 0.01


def attention_rows(q: Tensor, at: Tensor, k: Tensor, shape: AttentionShape, positions: Tensor | None = None) -> Tensor:
    """Return the attention of some queries to all entries.

    Args:
        q: (Hq, m, D) queries after RoPE.
        at: (m,) their positions.
        k: (Hkv, n, D) keys after RoPE.
        shape: Settings of the layer.
        positions: (Hkv, n) positions of the keys, -1 for none; None for 0 to n - 1.

    Returns:
        (Hq, m, n) float32; 0 where a query does not see an entry, NaN where it sees none.
    """
    n = k.shape[1]
    scaled = q.float().reshape(len(k), -1, q.shape[2]) * shape.scale
    logits = (scaled @ k.float().transpose(1, 2)).view(len(q), -1, n)
    if shape.softcap:
        logits = logits.div_(shape.softcap).tanh_().mul_(shape.softcap)
    behind = at[:, None] - (torch.arange(n, device=q.device) if positions is None else positions[:, None])
    hidden = behind < 0
    if shape.window:
        hidden |= behind >= shape.window
    if positions is not None:
        hidden = (hidden | (positions < 0)[:, None]).repeat_interleave(len(q) // len(k), 0)
    logits.masked_fill_(hidden, -torch.inf)
    if shape.sink_logits is not None:
        sinks = shape.sink_logits.to(logits).view(-1, 1, 1).expand(-1, logits.shape[1], 1)
        return torch.cat([logits, sinks], -1).softmax(-1)[..., :-1]
    return logits.softmax(-1)


def attention_per_query(
    q: Tensor, at: Tensor, k: Tensor, shape: AttentionShape, unit: int = UNIT, least: int = 1
) -> Tensor:
    """Return how much attention a token gets from a query behind it that sees it.

    It is the mean over the queries of a unit and the query heads of a KV head, in the largest KV head.

    Args:
        q: (Hq, m, D) sampled queries after RoPE.
        at: (m,) their positions, ascending.
        k: (Hkv, n, D) keys after RoPE of positions 0 to n - 1.
        shape: Settings of the layer.
        unit: Tokens of a unit, whose queries alone are asked about its tokens; at least n asks all.
        least: Queries are asked that are at least so far behind a token; 1 or more.

    Returns:
        (n,) float32.
    """
    n = k.shape[1]
    attention = torch.zeros(n, device=k.device)
    for begin in range(0, n, unit):
        end = min(begin + unit, n)
        asked = (at >= begin) & (at < end)
        if not bool(asked.any()):
            continue
        positions = at[asked]
        sums = k.new_zeros((len(k), end - begin), dtype=torch.float32)
        for some, where in zip(torch.split(q[:, asked], TOGETHER, 1), torch.split(positions, TOGETHER), strict=True):
            last = int(where[-1]) + 1  # no query of these sees what is behind
            rows = attention_rows(some, where, k[:, :last], shape)[..., begin:]
            near = max(begin, int(where[0]) - least + 1)
            behind = where[:, None] - torch.arange(near, last, device=k.device)
            rows[..., near - begin :].masked_fill_(behind < least, 0)
            sums[:, : last - begin] += rows.reshape(len(k), -1, last - begin).sum(1) / (len(q) // len(k))
        behind = positions[:, None] - torch.arange(begin, end, device=k.device)
        seen = ((behind >= least) & (behind < (shape.window or n))).sum(0)
        attention[begin:end] = (sums / seen.clamp(min=LEAST_QUERIES)).max(0).values
    return attention


def attention_to_kept(q: Tensor, at: Tensor, k: Tensor, positions: Tensor, shape: AttentionShape) -> Tensor:
    """Return how much attention a kept entry gets from a query behind it that sees it.

    Queries attend to what their KV head keeps alone. It is the mean over the queries of the text and the query heads of
    the KV head.

    Args:
        q: (Hq, m, D) sampled queries after RoPE.
        at: (m,) their positions.
        k: (Hkv, n, D) keys after RoPE.
        positions: (Hkv, n) int64 their positions, -1 for none.
        shape: Settings of the layer.

    Returns:
        (Hkv, n) float32; 0 where there is no entry.
    """
    sums = torch.zeros(positions.shape, device=k.device)
    seen = torch.zeros_like(positions)
    for some, where in zip(torch.split(q, TOGETHER, 1), torch.split(at, TOGETHER), strict=True):
        behind = where[:, None] - positions[:, None]
        asked = (behind > 0) & (positions >= 0)[:, None]
        if shape.window:
            asked &= behind < shape.window
        rows = attention_rows(some, where, k, shape, positions)
        sums += rows.view(len(k), -1, *rows.shape[1:]).mean(1).masked_fill(~asked, 0).sum(1)
        seen += asked.sum(1)
    return sums / seen.clamp(min=LEAST_QUERIES)


def most_attended_of_units(attention: Tensor) -> Tensor:
    """Return which tokens are exact by rank in their unit, (n,) bool.

    They are three of each, and as large a share of a last part.

    Args:
        attention: (n,) of tokens from the beginning of a unit on; one with 0 is not exact.
    """
    whole = len(attention) // UNIT
    mask = torch.zeros_like(attention, dtype=torch.bool)
    for units, length in ((slice(whole * UNIT), UNIT), (slice(whole * UNIT, None), len(attention) % UNIT)):
        part = attention[units].view(-1, length) if length else attention[:0, None]
        top = part.topk(round(UNIT_EXACT * length / UNIT), 1)
        mask[units].view(part.shape).scatter_(1, top.indices, top.values > 0)
    return mask


def most_attended(attention: Tensor, share: float = SHARE) -> Tensor:
    """Return which tokens are exact by rank, (n,) bool: a share of a whole text."""
    mask = torch.zeros_like(attention, dtype=torch.bool)
    mask[attention.topk(round(share * len(attention))).indices] = True
    return mask
