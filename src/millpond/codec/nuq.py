"""Non-uniform datatype of KVQuant (Hooper et al., NeurIPS 2024, arXiv:2401.18079): a table of numbers per layer.

Numbers are brought to [-1, 1] by the range of their channel (keys) or token (values), outliers left out, and clustered
in one dimension, weighted by how much the loss minds an error there (Fisher information).
"""

from __future__ import annotations

import torch
from torch import Tensor

from millpond.errors import OptionError
from millpond.kernels.packed.across_heads import outer, token_range
from millpond.kernels.packed.codes import inliers
from millpond.kernels.packed.layout import Format, Side, outer_count

#: Points that the exact search reads; more are gathered into as many bins of equal count first.
MAX_POINTS = 1024
#: Rounds of Lloyd's algorithm after the exact search over bins.
ROUNDS = 50
#: Numbers that a table is made of at most, and that torch sorts for quantiles at a time.
MAX_SAMPLES, MAX_QUANTILES = 2**22, 2**23


def kmeans(samples: Tensor, weights: Tensor | None, k: int) -> Tensor:
    """Return the k ascending centres of least weighted squared error, (k,) float64.

    The result is deterministic. It is exact by dynamic programming over sorted points, up to MAX_POINTS of them;
    beyond, exact over bins of equal count and refined on all samples by Lloyd's algorithm.

    Args:
        samples: (n,) numbers.
        weights: (n,) at least 0; None for 1.
        k: Number of centres.

    Raises:
        OptionError: fewer than one sample, or weights that are negative or all zero.
    """
    x, order = samples.flatten().double().sort()
    w = torch.ones_like(x) if weights is None else weights.flatten().double()[order]
    if len(x) == 0 or float(w.sum()) <= 0 or float(w.min()) < 0:
        raise OptionError("k-means needs samples with weights that are not negative and not all zero")
    x, w = x[w > 0], w[w > 0]
    points, mass = _bins(x, w)
    centres = _exact(points, mass, min(k, len(points)))
    if len(points) < len(x):
        centres = _lloyd(x, w, centres)
    return torch.cat([centres, centres[-1:].expand(k - len(centres))])


def _bins(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Return sorted points as at most MAX_POINTS weighted means of neighbours."""
    if len(x) <= MAX_POINTS:
        return x, w
    bin_of = torch.arange(len(x)) * MAX_POINTS // len(x)
    mass = torch.zeros(MAX_POINTS, dtype=x.dtype).index_add(0, bin_of, w)
    return torch.zeros_like(mass).index_add(0, bin_of, w * x) / mass, mass


def _sums(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    zero = torch.zeros(1, dtype=x.dtype)
    first, second, third = (torch.cat([zero, t.cumsum(0)]) for t in (w, w * x, w * x * x))
    return first, second, third


def _exact(x: Tensor, w: Tensor, k: int) -> Tensor:
    """Return the exact cuts of k clusters by dynamic programming.

    best[j] = min_i best[i] + error of one cluster over points i .. j - 1, k times; then the cuts are read back.
    """
    mass, moment, square = _sums(x, w)
    m = mass[None, :] - mass[:, None]
    s = moment[None, :] - moment[:, None]
    error = (square[None, :] - square[:, None]) - s * s / m.clamp(min=torch.finfo(x.dtype).tiny)
    error = torch.where(torch.ones_like(error, dtype=torch.bool).triu(1), error.clamp(min=0.0), torch.inf)
    best = error[0]
    cuts = []
    for _ in range(k - 1):
        best, cut = (best[:, None] + error).min(0)
        cuts.append(cut)
    ends = [len(x)]
    for cut in reversed(cuts):
        ends.append(int(cut[ends[-1]]))
    bounds = torch.tensor([0, *reversed(ends)])
    return (moment[bounds[1:]] - moment[bounds[:-1]]) / (mass[bounds[1:]] - mass[bounds[:-1]])


def _lloyd(x: Tensor, w: Tensor, centres: Tensor) -> Tensor:
    mass, moment, _ = _sums(x, w)
    for _ in range(ROUNDS):
        cuts = torch.searchsorted(x, (centres[1:] + centres[:-1]) / 2)
        bounds = torch.cat([torch.zeros(1, dtype=torch.long), cuts, torch.tensor([len(x)])])
        m, s = mass[bounds[1:]] - mass[bounds[:-1]], moment[bounds[1:]] - moment[bounds[:-1]]
        moved = torch.where(m > 0, s / m.clamp(min=torch.finfo(x.dtype).tiny), centres)
        if torch.equal(moved, centres):
            break
        centres = moved
    return centres


def as_table(centres: Tensor) -> tuple[float, ...]:
    """Return centres as bfloat16, ascending, within [-1, 1]: the form of `Side.table`."""
    return tuple(centres.clamp(-1.0, 1.0).bfloat16().float().sort().values.tolist())


def channel_range(x: Tensor, outliers: float) -> tuple[Tensor, Tensor]:
    """Return half the range and the middle of each channel, without outliers: (D,) each.

    Args:
        x: (N, D) numbers.
        outliers: Share of numbers outside the range, both ends together; 0 for none.
    """
    ends = torch.tensor([outliers / 2, 1 - outliers / 2], dtype=torch.float64, device=x.device)
    together = max(1, MAX_QUANTILES // len(x))  # channels
    quantiles = [x[:, c : c + together].double().quantile(ends, 0) for c in range(0, x.shape[1], together)]
    low, high = torch.cat(quantiles, 1)
    return ((high - low) / 2).float(), ((high + low) / 2).float()


def normalised_keys(
    keys: Tensor, fisher: Tensor | None, outliers: float = 0.01, *, by_range: bool = True
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return inliers (n,) in [-1, 1], their weights (n,), scales (D,) and zeros (D,) of keys.

    Args:
        keys: (N, D) of one KV head, or of all heads of a layer side by side.
        fisher: (N, D) squared gradients, or None.
        outliers: Share of numbers outside the range of a channel.
        by_range: Weigh by fisher * range^2, which is what an error of the normalised number costs; the published code
            weighs by fisher alone.
    """
    scale, zero = channel_range(keys, outliers)
    y = (keys.float() - zero) / scale.clamp(min=torch.finfo(torch.float32).tiny)
    return *_inside(y, y.abs() <= 1, fisher, scale if by_range else None), scale, zero


def normalised_values(
    values: Tensor, fisher: Tensor | None, n_extra: int, *, by_range: bool = True
) -> tuple[Tensor, Tensor]:
    """Return inliers (n,) in [-1, 1] and their weights (n,) of values (P, slots, D).

    Each page is of one KV head. Ranges are those of a slot of a head, and outliers the `n_extra` of a page, as when
    values are stored.
    """
    x = values.float()
    inlier = inliers(x, Side(Format.NUQ4, n_extra=n_extra), None) if n_extra else torch.ones_like(x, dtype=torch.bool)
    low, high = (torch.where(inlier, x, s * torch.inf).mul(s).amin(-1, keepdim=True) * s for s in (1.0, -1.0))
    scale, zero = (high - low) / 2, (high + low) / 2
    y = (x - zero) / scale.clamp(min=torch.finfo(torch.float32).tiny)
    return _inside(y, inlier & (y.abs() <= 1), fisher, scale if by_range else None)


def normalised_token_values(
    values: Tensor, fisher: Tensor | None, outliers: float, *, by_range: bool = True
) -> tuple[Tensor, Tensor]:
    """Return inliers (n,) in [-1, 1] and their weights (n,) of values (N, W).

    W are all KV heads of a token side by side. Ranges are those of a token without its outliers: the largest and the
    smallest of its numbers, `outliers` of them.
    """
    x = values.float()
    outlier = outer(x, outer_count(outliers, x.shape[1]))
    low, high = token_range(x, outlier)
    scale, zero = (high - low) / 2, (high + low) / 2
    y = (x - zero) / scale.clamp(min=torch.finfo(torch.float32).tiny)
    return _inside(y, ~outlier & (y.abs() <= 1), fisher, scale if by_range else None)


def _inside(y: Tensor, inside: Tensor, fisher: Tensor | None, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the numbers `inside` with weights above 0, and these.

    Of very many, evenly spread ones are returned.
    """
    weights = torch.ones_like(y) if fisher is None else fisher.float()
    weights = weights if scale is None else weights * scale.square()
    inside = inside & (weights > 0)
    y, weights = y[inside], weights[inside]
    step = -(-len(y) // MAX_SAMPLES)
    return y[::step], weights[::step]


def key_table(
    keys: Tensor, fisher: Tensor | None, bits: int, outliers: float = 0.01, *, by_range: bool = True
) -> tuple[tuple[float, ...], Tensor, Tensor]:
    """Return table, scales (D,) and zeros (D,) of keys (N, D), see `normalised_keys`."""
    y, weights, scale, zero = normalised_keys(keys, fisher, outliers, by_range=by_range)
    return as_table(kmeans(y, weights, 1 << bits)), scale, zero


def q_norm(table: tuple[float, ...], y: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return table and cuts of Q-Norm, whose numbers have the mean and deviation of y.

    Codes are chosen as before.

    Args:
        table: Table of `as_table`.
        y: Normalised inliers of the calibration text.

    Returns:
        `table` and `cuts` of a `Side`.
    """
    numbers = torch.tensor(table, dtype=torch.float64)
    cuts = (numbers[1:] + numbers[:-1]) / 2
    read = numbers[torch.bucketize(y.double(), cuts)]
    a = y.double().std(correction=0) / read.std(correction=0).clamp(min=torch.finfo(torch.float64).tiny)
    moved = numbers * a + (y.double().mean() - read.mean() * a)
    return tuple(moved.bfloat16().float().tolist()), tuple(cuts.tolist())
