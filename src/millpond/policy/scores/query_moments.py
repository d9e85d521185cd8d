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
    """Sums over the queries of one sequence in one layer, added up in float64, so that any chunks give the same.

    Attributes:
        count: How many queries.
        total: (Hq, D), their sum.
        outer: (Hq, D, D), the sum of q q^T.
    """

    count: int
    total: Tensor
    outer: Tensor

    @classmethod
    def of(cls, queries: Tensor) -> QueryMoments:
        """Return the moments of some hundred queries (Hq, n, D), whose products are summed in float32 or wider."""
        q = queries.to(torch.promote_types(queries.dtype, torch.float32))
        return cls(q.shape[1], q.sum(1).double(), (q.transpose(1, 2) @ q).double())

    def __add__(self, other: QueryMoments) -> QueryMoments:
        return QueryMoments(self.count + other.count, self.total + other.total, self.outer + other.outer)

    @property
    def mean(self) -> Tensor:
        """(Hq, D); 0 where there are no queries."""
        return self.total / max(self.count, 1)

    @property
    def covariance(self) -> Tensor:
        """(Hq, D, D), over count; 0 where there are no queries."""
        return self.outer / max(self.count, 1) - self.mean[:, :, None] * self.mean[:, None, :]


@dataclass(frozen=True, slots=True)
class QueryView(View):
    """A view of a layer whose score needs the moments of its queries.

    Attributes:
        moments: Of the queries so far, those at the sinks left out.
        rotate: Rotates queries as the layer does; None where it does not.
        scale: Of the layer's logits q k.
    """

    moments: QueryMoments | None = None
    rotate: Rotate | None = None
    scale: float = 1.0


def moments_of(view: View) -> tuple[QueryView, QueryMoments]:
    """Return the view with the moments that it shows."""
    assert isinstance(view, QueryView), "the cache provides the moments that a score declares"
    assert view.moments is not None, "a plan comes after a pass, which has queries"
    return view, view.moments


def mean_rotation(rotate: Rotate | None, dim: int, first: int, n: int, device: torch.device) -> Tensor:
    """Return (D, D) float64: the mean of the rotation matrices R_t over positions first <= t < first + n."""
    eye = torch.eye(dim, dtype=torch.float64, device=device)
    if rotate is None:
        return eye
    total = torch.zeros_like(eye)
    for start in range(first, first + n, BLOCK):
        positions = torch.arange(start, min(start + BLOCK, first + n), device=device)[None]
        vectors = eye[None, :, None].expand(1, dim, positions.shape[1], dim)
        total += rotate(vectors, positions)[0].sum(1)  # row d is the sum of R_t e_d
    return total.T / n
