"""Expected Attention: predicted attention of future queries (Devoto et al., 2025, arXiv:2510.00636)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from millpond.errors import OptionError
from millpond.kernels.decode_rules import Evict, Reduce, Signal
from millpond.kernels.eager.softmax import reduce_group
from millpond.methods import method
from millpond.methods._base import across_layers
from millpond.methods._options import Across, GrowInPaper, Recent
from millpond.option_ranges import POSITIONS, Range
from millpond.policy.policy import Policy
from millpond.policy.protect import Protect
from millpond.policy.scores.attention import Queries
from millpond.policy.scores.query_moments import mean_rotation, moments_of
from millpond.policy.view import View

#: Keys that are processed together: few, so that their products stay in the cache.
BLOCK = 512
_REDUCE = {"mean": Reduce.MEAN, "max": Reduce.MAX}


@dataclass(frozen=True, slots=True)
class ExpectedAttentionScore:
    """s_j = (a_j + eps) * ||v_j||, a_j = softmax_j(c mu.k_j + c^2 k_j^T Sigma k_j / 2).

    c is the scale of the logits.
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
        """Return (H, N): the expected attention, the query heads of a group reduced."""
        keys = view.keys
        moments_view, moments = moments_of(view)
        n_heads, _, dim = keys.shape
        turn = mean_rotation(moments_view.rotate, dim, view.seen, self.future, keys.device)
        mean = (moments.mean @ turn.T).to(keys.dtype).view(n_heads, -1, dim)
        logits = moments_view.scale * (mean @ keys.transpose(1, 2))  # (H, group, N)
        if self.covariance:
            spread = (turn @ moments.covariance @ turn.T).to(keys.dtype).view(n_heads, -1, dim, dim)
            logits += moments_view.scale**2 / 2 * quadratic_forms(keys, spread)
        free = view.free[:, None]
        p = torch.softmax(logits.masked_fill(~free, float("-inf")), -1)
        return reduce_group(torch.where(free, p, 0), _REDUCE[self.reduce], 1)  # without free entries no softmax


def quadratic_forms(keys: Tensor, matrices: Tensor) -> Tensor:
    """Return (H, group, N): k_j^T M k_j.

    Keys are (H, N, D), the matrices of their heads (H, group, D, D).
    """
    n_heads, group, dim, _ = matrices.shape
    side_by_side = matrices.transpose(1, 2).reshape(n_heads, dim, group * dim)
    parts = []
    for rows in torch.split(keys, BLOCK, 1):
        products = (rows @ side_by_side).view(n_heads, -1, group, dim)
        parts.append((products * rows[:, :, None]).sum(-1))
    return torch.cat(parts, 1).transpose(1, 2)


@method("expected_attention", paper="arXiv:2510.00636")
def expected_attention(
    future: Annotated[
        int, "positions to come over which the rotation of the queries is averaged", Range(1, 4096)
    ] = 512,
    covariance: Annotated[bool, "use the covariance of the queries, not only their mean"] = True,
    value_norms: Annotated[bool, "weigh the attention by the length of the values"] = True,
    eps: Annotated[float, "added to the attention before it is weighed", Range(0.0, 1e6)] = 0.0,
    reduce: Annotated[Literal["mean", "max"], "query heads of a GQA group to their KV head"] = "mean",
    sinks: Annotated[int, "first positions that always stay, and whose queries do not count", POSITIONS] = 4,
    recent: Recent = 0,
    decode: GrowInPaper = "grow",
    across: Across = False,
) -> Policy:
    """Keep entries with long values that later queries should attend to, for any question.

    The prompt's queries before RoPE are taken for a Gaussian with mean mu and covariance Sigma; R is the mean of the
    rotations of the next `future` positions. Entry j then expects z_j = exp(k_j.R mu / sqrt d + k_j^T R Sigma R^T k_j
    / 2d), a_j = z_j / sum_i z_i of each query head, and s_j = (a_j + eps) ||v_j||, averaged over a group.

    Queries are rotated back exactly, so that models which normalise them (Qwen3, Gemma 3) work too; without rotary
    positions R is 1. A model that limits its logits (Gemma 2) is taken as if it did not.

    Departs from the paper: there each layer's budget is shared by its heads; that is ada with this as its score.
    decode="evict" continues with the queries of each step, and each ends with a plan, which is slow; the paper waits
    for a number of steps.
    """
    policy = Policy(
        score=ExpectedAttentionScore(future, covariance, value_norms, eps, reduce),
        protect=Protect(sinks=sinks, recent=recent),
        every_step=decode == "evict",
        once=decode == "once",
    )
    return across_layers("expected_attention", policy, across)
