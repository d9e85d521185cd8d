"""Scores from one direction per head, along which keys draw attention (Q-Filters)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from millpond.errors import CacheMismatchError
from millpond.kernels.decode_rules import Evict, Signal
from millpond.policy.scores.attention import Queries
from millpond.policy.scores.query_moments import QueryMoments, moments_of
from millpond.policy.view import View


@dataclass(frozen=True, slots=True, eq=False)
class QueryFilter:
    """s_j = <k_j, f>: f the direction of the text's queries after RoPE, or a given one.

    Attributes:
        filters: (layers, KV heads, key_dim); None: those of the queries so far.
    """

    filters: Tensor | None = None
    window: int = 0
    signal: Signal = Signal.NONE
    evict: Evict | None = None

    @property
    def queries(self) -> Queries:
        return "rotated" if self.filters is None else "none"

    def score(self, view: View, seed: int) -> Tensor:
        """
        Raises:
            CacheMismatchError: the filters are of another model.
        """
        keys = view.keys
        if self.filters is None:
            direction = query_directions(moments_of(view)[1], len(keys))
        else:
            direction = self._given(view.layer, keys)
        return (keys * direction.to(keys)[:, None]).sum(-1)

    def _given(self, layer: int, keys: Tensor) -> Tensor:
        assert self.filters is not None
        n_layers, *shape = self.filters.shape
        if layer >= n_layers or shape != [len(keys), keys.shape[-1]]:
            raise CacheMismatchError(
                f"layer {layer} has keys of {len(keys)} heads x {keys.shape[-1]} numbers; the filters are of "
                f"{n_layers} layers with {shape[0]} x {shape[1]}: take those of this model"
            )
        return self.filters[layer]


def query_directions(moments: QueryMoments, n_kv_heads: int) -> Tensor:
    """(H, D) float64: the first right singular vector of each query head's queries, averaged over its group.

    Its sign is the one with which the mean query has a positive projection.
    """
    first: Tensor = torch.linalg.eigh(moments.outer.nan_to_num())[1][..., -1]  # of Q^T Q, ascending
    along = (first * moments.mean).sum(-1, keepdim=True)  # NaN stays NaN, for the plan to report
    signed = torch.where(along < 0, -first, first) + 0 * along
    return signed.view(n_kv_heads, -1, signed.shape[-1]).mean(1)
