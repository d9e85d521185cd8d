"""Mean and second moments of all queries of a text, without the queries themselves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from millpond.policy.view import View

#: Rotates queries or keys (B, H, n, D) to positions (B, n).
Rotate = Callable[[Tensor, Tensor], Tensor]
#: Positions that a mean rotation takes together.
BLOCK = 64


@dataclass(frozen=True, slots=True, eq=False)
class QueryMoments:
    """Sums over the queries of one sequence in one layer, in float64, equal for any chunks.

    Attributes:
        count: Number of queries.
        total: (Hq, D), the sum of the queries.
        outer: (Hq, D, D), the sum of q q^T.
    """

    count: int
    total: Tensor
    outer: Tensor

    @classmethod
    def of(cls, queries: Tensor) -> QueryMoments:
        """Return the moments of queries (Hq, n, D), summed in float32 or wider.

        n is some hundred.
        """
        q = queries.to(torch.promote_types(queries.dtype, torch.float32))
        return cls(q.shape[1], q.sum(1).double(), (q.transpose(1, 2) @ q).double())

    def __add__(self, other: QueryMoments) -> QueryMoments:
        return QueryMoments(self.count + other.count, self.total + other.total, self.outer + other.outer)

    @property
    def mean(self) -> Tensor:
        """(Hq, D), the mean; 0 if there are no queries."""
        return self.total / max(self.count, 1)

    @property
    def covariance(self) -> Tensor:
        """(Hq, D, D), the covariance over count; 0 if there are no queries."""
        return self.outer / max(self.count, 1) - self.mean[:, :, None] * self.mean[:, None, :]


@dataclass(frozen=True, slots=True)
class QueryView(View):
    """View of a layer for a score that needs the moments of its queries.

    Attributes:
        moments: Moments of the queries so far, without those at the sinks.
        rotate: Rotates queries as the layer does; None if it does not rotate them.
        scale: Factor of the layer's logits q k.
    """

    moments: QueryMoments | None = None
    rotate: Rotate | None = None
    scale: float = 1.0


def moments_of(view: View) -> tuple[QueryView, QueryMoments]:
    """Return the view with its moments, checked to be there."""
    assert isinstance(view, QueryView), "the cache provides the moments that a score declares"
    assert view.moments is not None, "a plan comes after a pass, which has queries"
    return view, view.moments


def mean_rotation(rotate: Rotate | None, dim: int, first: int, n: int, device: torch.device) -> Tensor:
    """Return (D, D) float64: the mean of the rotations R_t, first <= t < first + n."""
    eye = torch.eye(dim, dtype=torch.float64, device=device)
    if rotate is None:
        return eye
    total = torch.zeros_like(eye)
    for start in range(first, first + n, BLOCK):
        positions = torch.arange(start, min(start + BLOCK, first + n), device=device)[None]
        vectors = eye[None, :, None].expand(1, dim, positions.shape[1], dim)
        total += rotate(vectors, positions)[0].sum(1)  # row d is the sum of R_t e_d
    return total.T / n
