"""Labels of retaining heads: how much any later query will want an entry."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from millpond.errors import OptionError
from millpond.kernels.args import AttentionShape

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
