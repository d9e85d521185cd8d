"""Arguments of `decode_rows`."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from millpond.kernels.args.queries import OfQueries
from millpond.kernels.args.regions import PageRegions
from millpond.kernels.args.shape import AttentionShape


@dataclass(frozen=True, slots=True)
class DecodeRowsArgs(OfQueries):
    """A few new tokens of each of S sequences, in n columns, and the regions that they meet and join.

    Attributes:
        q: (S, Hq, n, key_dim), query heads grouped by KV head as for `DecodeArgs`.
        k_new, v_new: (S, Hkv, n, key_dim), (S, Hkv, n, value_dim).
        regions: the R = S * Hkv regions of the layer, all in plain pages; memory and `lens` are written. Pages for all
            new entries must be there.
        q_pos: (S, n) int32, the position of each token in its own text, rising along a row; -1: no token here.
        shape: of the attention.
    """

    q: Tensor
    k_new: Tensor
    v_new: Tensor
    regions: PageRegions
    q_pos: Tensor
    shape: AttentionShape
