"""Merge that fits masses and values of what stays to what queries got from everything (Attention Matching)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from millpond.errors import OptionError
from millpond.policy.merging import Merged, own_scores
from millpond.policy.view import View

#: Steps of the fit of masses.
_STEPS = 200


@dataclass(frozen=True, slots=True)
class MatchAttention:
    """Fit what stays of each KV head to what queries of a repetition got from everything.

    It is Attention Matching (arXiv:2602.16284).

    A (m, N) is their attention to all entries and S the entries that stay, without those that are pinned, P, which are
    left as they are. A mass b_j multiplies the attention to entry j:

        b = argmin ||A_S b + A_P 1 - A 1||^2 + sum_j w_j (b_j - 1)^2,  1 / most <= b_j <= most

    and W = [A_S b, A_P] / (A_S b + A_P 1) being the attention to what stays, row by row,

        V_S = argmin ||W V - A v / A 1||^2 + sum_j w_j ||V_j - v_j||^2.

    w_j = ridge * (mean of the diagonal of A_S^T A_S, or W_S^T W_S) + s_j^2: of all queries that were run, not of these
    m alone, the one that attends to j most counts as one that wants j as it was. Keys, positions and accumulators stay.

    Attributes:
        masses: Whether masses are fitted; else each stays.
        values: Whether values are; else each stays.
        ridge: See w.
        most: Factor by which a mass may change at most, in either direction.
    """

    masses: bool = True
    values: bool = True
    ridge: float = 1e-3
    most: float = math.e**3

    def __post_init__(self) -> None:
        if not self.ridge > 0:
            raise OptionError(f"ridge={self.ridge:g} must be above 0: more entries may stay than there are queries")
        if not self.most >= 1:
            raise OptionError(f"most={self.most:g} must be at least 1, which changes no mass")

    def merge(self, view: View, keep: Tensor, value: Tensor, seed: int) -> Merged:
        keys, values = view.stored("keys"), view.stored("values")
        logs = torch.zeros(view.positions.shape, device=keep.device) if view.log_masses is None else view.log_masses
        if view.repeated_rows is not None:
            logs = logs.clone()
            values = values.to(torch.promote_types(values.dtype, torch.float32), copy=True)
            free = view.free
            for head in range(len(keep)):
                own = view.valid[head]
                if bool((own & ~keep[head]).any()) and bool((keep[head] & free[head]).any()):
                    rows = view.rows_of_repetition(head).flatten(0, 1).nan_to_num()  # of queries that see none
                    most = value[head, own].to(rows.dtype).clamp(0, 1)
                    fitted = self.fitted(rows[:, own], values[head, own], keep[head, own], free[head, own], most)
                    logs[head, own] += fitted[0].log().to(logs.dtype)
                    values[head, own] = fitted[1]
        return Merged(keys, values, logs, own_scores(view))

    def fitted(self, rows: Tensor, values: Tensor, keep: Tensor, free: Tensor, most: Tensor) -> tuple[Tensor, Tensor]:
        """Return the factors of the masses (N,) of one head and its values (N, D).

        Those of what leaves do not matter.

        Args:
            rows: (m, N) attention.
            values: (N, D).
            keep: (N,) bool, the entries that stay.
            free: (N,) bool, those that may change.
            most: (N,) the largest attention to each from any query.
        """
        chosen, total = keep & free, rows.sum(1)
        pinned = rows[:, keep & ~free]
        factors = torch.ones_like(total[:1]).expand(rows.shape[1]).clone()
        some = rows[:, chosen]
        if self.masses:
            factors[chosen] = self._factors(some, total - pinned.sum(1), self._weights(some, most[chosen]))
        if not self.values:
            return factors, values
        weights = some * factors[chosen]
        sums = (weights.sum(1) + pinned.sum(1)).clamp(min=torch.finfo(rows.dtype).tiny)[:, None]
        held = pinned @ values[keep & ~free]
        wanted = rows @ values / total.clamp(min=torch.finfo(rows.dtype).tiny)[:, None] - held / sums
        values = values.clone()
        shares = weights / sums
        values[chosen] = _ridge(shares, wanted, values[chosen], self._weights(shares, most[chosen]))
        return factors, values

    def _weights(self, rows: Tensor, most: Tensor) -> Tensor:
        """Return (t,) the weight of each entry as it was."""
        tiny = torch.finfo(rows.dtype).tiny
        return (self.ridge * rows.square().sum(0).mean() + most.square()).clamp(min=tiny)

    def _factors(self, rows: Tensor, wanted: Tensor, weight: Tensor) -> Tensor:
        """Return b (t,) of rows (m, t), by projected gradients with momentum."""
        bound = rows.T @ rows.sum(1) + weight  # a diagonal that is above the matrix of squares
        b = ahead = torch.ones_like(rows[0])
        momentum = 1.0
        for _ in range(_STEPS):
            slope = rows.T @ (rows @ ahead - wanted) + weight * (ahead - 1)
            new = (ahead - slope / bound).clamp(1 / self.most, self.most)
            following = (1 + math.sqrt(1 + 4 * momentum**2)) / 2
            ahead = new + (momentum - 1) / following * (new - b)
            b, momentum = new, following
        return b


def _ridge(shares: Tensor, wanted: Tensor, before: Tensor, weight: Tensor) -> Tensor:
    """Return V (t, D) with shares (m, t) @ V = wanted (m, D), in least squares.

    The weight of what was before is `weight` (t,).
    """
    m, t = shares.shape
    rest, tilted = wanted - shares @ before, shares / weight
    square = tilted @ shares.T if m < t else shares.T @ shares
    if m < t:
        square.diagonal().add_(1)
        factor, failed = torch.linalg.cholesky_ex(square)
        return before if int(failed) else before + tilted.T @ torch.cholesky_solve(rest, factor)
    square.diagonal().add_(weight)
    factor, failed = torch.linalg.cholesky_ex(square)
    return before if int(failed) else before + torch.cholesky_solve(shares.T @ rest, factor)
