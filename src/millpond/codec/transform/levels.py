"""Levels of Lloyd (1957/1982) and Max (1960) for 1 to 7 bits, and the distortion that they leave each dimension."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

#: Most bits of a number.
MOST_BITS = 7
#: Rounds of Lloyd's algorithm at most.
ROUNDS = 100
#: Numbers that levels are fitted to at most.
MOST_SAMPLES = 1 << 17

#: Mean bits of a dimension that levels are fitted for, and fewest dimensions that they are fitted to.
USUAL_BITS, LEAST_ROWS = 1.5, 8

#: Levels by bits, 1 to `MOST_BITS`: ascending float32 of 2, 4, ... 128 numbers.
Levels = tuple[Tensor, ...]


def fit_levels(samples: Sequence[Tensor]) -> Levels:
    """Return the levels of least squared error for numbers of 1 to `MOST_BITS` bits.

    Args:
        samples: For each number of bits (n,) numbers; of more than `MOST_SAMPLES`, evenly spread ones are used.
    """
    return tuple(_fitted(numbers.flatten(), bits) for bits, numbers in enumerate(samples, 1))


def _fitted(flat: Tensor, bits: int) -> Tensor:
    x = flat[:: -(-len(flat) // MOST_SAMPLES)].double().sort().values
    return _lloyd(x, torch.cat([x.new_zeros(1), x.cumsum(0)]), bits).float()


def rows_by_bits(variances: Tensor, mean_bits: float = USUAL_BITS) -> list[Tensor]:
    """Return the dimensions whose numbers the levels of 1 to `MOST_BITS` bits are fitted to.

    Dimensions of little variance have long tails, and those of much have none: levels of b bits are for those whose
    share of `mean_bits` by their variance, log2(variance / level) / 2, is within one of b, and at least the nearest 8.

    Args:
        variances: (rows,) of the dimensions under the metric.
        mean_bits: Mean bits of a dimension.
    """
    logs = variances.double().clamp(min=1e-300).log2() / 2
    low, high = float(logs.min()) - MOST_BITS, float(logs.max())
    level = low
    for _ in range(60):
        level = (low + high) / 2
        if float((logs - level).clamp(0, MOST_BITS).mean()) > mean_bits:
            low = level
        else:
            high = level
    found = []
    for bits in range(1, MOST_BITS + 1):
        distance = (logs - level - bits).abs()
        nearest = distance.argsort(stable=True)[: max(int((distance <= 1).sum()), LEAST_ROWS)]
        found.append(nearest.sort().values)
    return found


def _lloyd(x: Tensor, sums: Tensor, bits: int) -> Tensor:
    """Return 2^bits levels for sorted numbers (n,) with their running sums (n + 1,).

    The first levels are quantiles of the density to the power of a third, which is optimal for many levels.
    """
    n, k = len(x), 1 << bits
    edges = x[torch.linspace(0, n - 1, min(n, 4 * k + 1), dtype=torch.float64).long()]
    widths = (edges[1:] - edges[:-1]).clamp(min=1e-12)
    weights = widths ** (2 / 3)  # density^(1/3) * width, with density ~ 1 / width
    share = torch.cat([x.new_zeros(1), weights.cumsum(0)]) / weights.sum()
    wanted = (torch.arange(k, dtype=torch.float64) + 0.5) / k
    index = torch.searchsorted(share, wanted).clamp(1, len(edges) - 1)
    part = (wanted - share[index - 1]) / (share[index] - share[index - 1])
    levels = edges[index - 1] + part * (edges[index] - edges[index - 1])
    for _ in range(ROUNDS):
        inner = torch.searchsorted(x, (levels[1:] + levels[:-1]) / 2)
        bounds = torch.cat([inner.new_zeros(1), inner, inner.new_full((1,), n)])
        counts = bounds[1:] - bounds[:-1]
        means = (sums[bounds[1:]] - sums[bounds[:-1]]) / counts.clamp(min=1)
        moved = torch.where(counts > 0, means, levels)
        if float((moved - levels).abs().max()) < 1e-7:
            break
        levels = moved.sort().values
    return levels


def cuts_of(levels: Tensor) -> Tensor:
    """Return the numbers between neighbouring levels, halfway in float32: (2^bits - 1,)."""
    return (levels[1:] + levels[:-1]) * 0.5


def nearest_codes(u: Tensor, levels: Tensor) -> Tensor:
    """Return the code of each number: how many cuts lie below it, in uint8 of the shape of u."""
    return torch.bucketize(u, cuts_of(levels)).to(torch.uint8)


def distortions(z: Tensor, levels: Sequence[Tensor]) -> Tensor:
    """Return the mean squared error of each dimension with 0 to `MOST_BITS` bits.

    Args:
        z: (n, rows) float32 numbers of mean 0 in each dimension.
        levels: Levels by bits.

    Returns:
        (rows, 1 + MOST_BITS) float32.
    """
    errors = [z.double().square().mean(0)]
    for table in levels:
        error = z - table[nearest_codes(z, table).long()]
        errors.append(error.double().square().mean(0))
    return torch.stack(errors, 1).float()
