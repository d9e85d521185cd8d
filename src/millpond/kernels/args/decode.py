"""Arguments and result of `decode`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from millpond.kernels.args.queries import OfQueries
from millpond.kernels.args.regions import StepRegions


@dataclass(frozen=True, slots=True)
class DecodeArgs(OfQueries):
    """One new token of each of S sequences, and the regions that it meets.

    Attributes:
        q: (S, Hq, key_dim), query heads grouped by KV head: query head h reads KV head h // (Hq // Hkv).
        k_new, v_new: (S, Hkv, key_dim), (S, Hkv, value_dim).
        regions: of the layer; written.
    """

    q: Tensor
    k_new: Tensor
    v_new: Tensor
    regions: StepRegions


class DecodeOutput(NamedTuple):
    """The attention output, and the evicted entries."""

    out: Tensor  #: (S, Hq, value_dim) in q's dtype
    lse: Tensor  #: (S, Hq) float32, the log of the denominator (sink included)
    evicted: Tensor  #: (R,) int32: the position that left, -1 if none did
