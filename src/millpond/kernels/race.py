"""Random draws by an exponential race: one number per row and token id, whatever else may be drawn.

Token j of weight w_j arrives at e_j / w_j, where e_j is exponential; token j is the first one with probability
w_j / sum(w). Since e_j depends on the key and the id alone, two distributions that are nearly the same mostly draw the
same token from one key, and to leave a token out changes only the draws that would have taken it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from millpond.kernels.backends import native_for

#: Constants of SplitMix64 (Steele, Lea and Flood 2014), as signed numbers: what overflows wraps around.
_STEP, _FIRST, _SECOND = (n - 2**64 for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def race(weights: Tensor, keys: Tensor, ids: Tensor | None = None) -> Tensor:
    """The column of each row that is drawn; never one without weight.

    Args:
        weights: (R, C) float32, at least 0, each row with one above 0; they need not sum to 1.
        keys: (R,) int64, random bits of each row's draw.
        ids: (R, C) int64, the token of each column; None: the column's number.

    Returns:
        (R,) int64.
    """
    native = native_for(weights.dtype, weights.device)
    if native is not None and weights.stride(-1) == 1 and (ids is None or ids.stride(-1) == 1):
        drawn: Tensor = native.race(weights, keys, ids)
        return drawn
    if ids is None:
        ids = torch.arange(weights.shape[-1], device=weights.device)
    return (weights.double() / -uniform(keys[:, None], ids).log()).argmax(-1)


def uniform(keys: Tensor, ids: Tensor) -> Tensor:
    """Numbers float64 inside (0, 1) with 52 random bits, of keys and ids int64, which broadcast."""
    z = keys + (ids + 1) * _STEP
    z = (z ^ _shifted(z, 30)) * _FIRST
    z = (z ^ _shifted(z, 27)) * _SECOND
    z = z ^ _shifted(z, 31)
    return (_shifted(z, 12).double() + 0.5) * 2.0**-52


def _shifted(z: Tensor, n: int) -> Tensor:
    """`z` shifted right by n bits, zeros coming in."""
    return (z >> n) & ((1 << 64 - n) - 1)
