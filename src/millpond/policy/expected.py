"""ExpectedAttentionScore: the attention that queries to come should pay, if they go on as those of the text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from millpond.errors import OptionError
from millpond.kernels.reference import reduce_group
from millpond.kernels.rules import Evict, Reduce, Signal
from millpond.policy.moments import mean_rotation, moments_of
from millpond.policy.score import Queries
from millpond.policy.view import View

_REDUCE = {"mean": Reduce.MEAN, "max": Reduce.MAX}


@dataclass(frozen=True, slots=True)
class ExpectedAttentionScore:
    """s_j = (a_j + eps) * ||v_j||, a_j = softmax_j(c mu.k_j + c^2 k_j^T Sigma k_j / 2), c the scale of the logits.

    mu and Sigma are mean and covariance of the text's queries before RoPE, turned by the mean rotation of the `future`
    positions to come: E exp(c q.k_j) of a Gaussian q. The softmax runs over the free entries, once per query head.
    """

    future: int = 512
    covariance: bool = True
    value_norms: bool = True
    eps: float = 0.0
    reduce: Literal["mean", "max"] = "mean"
    queries: Queries = "unrotated"
    window: int = 0
    signal: Signal = Signal.NONE
    evict: Evict | None = None

    def __post_init__(self) -> None:
        if self.future < 1:
            raise OptionError(f"future={self.future} must be at least 1, the position of the next query")
        if self.eps < 0:
            raise OptionError(f"eps={self.eps} must not be negative")

    def score(self, view: View, seed: int) -> Tensor:
        attention = self._attention(view)
        if not self.value_norms:
            return attention
        length: Tensor = torch.linalg.vector_norm(view.values, dim=-1)
        return (attention + self.eps) * length

    def _attention(self, view: View) -> Tensor:
        """(H, N): the expected attention, the query heads of a group reduced."""
        keys = view.keys
        shown, moments = moments_of(view)
        n_heads, _, dim = keys.shape
        turn = mean_rotation(shown.rotate, dim, view.seen, self.future, keys.device)
        mean = (moments.mean @ turn.T).to(keys.dtype).view(n_heads, -1, dim)
        spread = (turn @ moments.covariance @ turn.T).to(keys.dtype).view(n_heads, -1, dim, dim)
        heads = []
        for query in range(mean.shape[1]):  # one query head of every group at a time
            logits = shown.scale * (keys @ mean[:, query, :, None])[..., 0]
            if self.covariance:
                logits = logits + shown.scale**2 / 2 * ((keys @ spread[:, query]) * keys).sum(-1)
            p = torch.softmax(logits.masked_fill(~view.free, float("-inf")), -1)
            heads.append(torch.where(view.free, p, 0))  # a head without free entries has no softmax
        return reduce_group(torch.stack(heads, 1), _REDUCE[self.reduce], 1)
