"""Transform of one side of a layer: from a metric and moments to rows, columns, levels and distortions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from millpond.codec.transform.levels import Levels, distortions, fit_levels, rows_by_bits
from millpond.errors import NumericsError

#: Share of the metric's mean that is added to its diagonal.
EPS_KEYS, EPS_VALUES = 0.1, 0.3
#: Dimensions whose variance is below this share of the largest have no row: they are constant up to rounding.
LEAST_VARIANCE = 1e-10


@dataclass(frozen=True, slots=True, eq=False)
class SideTransform:
    """Transform of the keys before RoPE or the values of a layer, d numbers a token.

    All KV heads of a token are one vector x. z = rows (x - mean) has mean 0 and deviation 1 in every dimension of the
    calibration; x^ = mean + columns' z. Rows and columns are numbers of bfloat16, by falling bits.

    Attributes:
        mean: (d,) float32.
        rows: (r, d) float32.
        columns: (r, d) float32.
        distortions: (r, 8) float32: what 0 to 7 bits leave of a dimension's error, in the model's unit.
        levels: Levels of z by bits, 1 to 7.
    """

    mean: Tensor
    rows: Tensor
    columns: Tensor
    distortions: Tensor
    levels: Levels

    @property
    def n_rows(self) -> int:
        return len(self.rows)

    def to(self, device: torch.device) -> SideTransform:
        """Return the transform on a device."""
        mean, rows, columns, errors = (t.to(device) for t in (self.mean, self.rows, self.columns, self.distortions))
        return SideTransform(mean, rows, columns, errors, tuple(table.to(device) for table in self.levels))

    def chosen(self, rows: Tensor) -> SideTransform:
        """Return the transform with some of its rows alone, by number, in their order."""
        return SideTransform(self.mean, self.rows[rows], self.columns[rows], self.distortions[rows], self.levels)


def fit_side(metric: Tensor, mean: Tensor, covariance: Tensor, samples: Tensor, eps: float) -> SideTransform:
    """Return the transform of least distortion dx' M dx at equal bits.

    R = (M + eps tr(M) / d I)^(1/2), E the eigenvectors of R Sigma R, T = E' R, all in float64; each dimension is then
    divided by its deviation.

    Args:
        metric: M, (d, d) symmetric.
        mean: (d,).
        covariance: Sigma, (d, d).
        samples: (n, d) tokens, for levels and distortions.
        eps: Share of the metric's mean eigenvalue that is added to it.

    Raises:
        NumericsError: the metric or the covariance is not finite, or all zero.
    """
    metric, mean, covariance = metric.double(), mean.double(), covariance.double()
    d = len(mean)
    trace = float(metric.trace())
    if not bool(metric.isfinite().all() and covariance.isfinite().all()) or trace <= 0:
        raise NumericsError("the calibration's attention weighs nothing, or is not finite: give other texts")
    identity = torch.eye(d, dtype=torch.float64, device=metric.device)
    values, vectors = torch.linalg.eigh((metric + metric.T) / 2 + eps * trace / d * identity)
    root = values.clamp(min=0).sqrt()
    forward, back = (vectors * root) @ vectors.T, (vectors / root) @ vectors.T
    product = forward @ covariance @ forward
    variances, directions = torch.linalg.eigh((product + product.T) / 2)
    variances, directions = variances.flip(0), directions.flip(1)
    keep = variances > LEAST_VARIANCE * variances[0].clamp(min=torch.finfo(torch.float64).tiny)
    if not bool(keep.any()):
        raise NumericsError("the calibration's keys or values are all equal: give other texts")
    variances, directions = variances[keep], directions[:, keep]
    deviations = variances.sqrt()
    rows = ((directions.T @ forward) / deviations[:, None]).bfloat16().float()
    columns = ((back @ directions) * deviations).T.bfloat16().float().contiguous()
    z = (samples - mean.float()) @ rows.T
    levels = fit_levels([z[:, chosen] for chosen in rows_by_bits(variances)])
    errors = (distortions(z, levels).double() * variances[:, None]).float()
    return SideTransform(mean.float(), rows, columns, errors, levels)
