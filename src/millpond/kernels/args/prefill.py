"""Arguments and result of `prefill`, and the arguments of `window_signal`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from millpond.kernels.args.queries import OfQueries
from millpond.kernels.args.shape import AttentionShape
from millpond.kernels.decode_rules import Reduce


@dataclass(frozen=True, slots=True)
class PrefillArgs(OfQueries):
    """Q new queries of one sequence, and N = n_past + Q columns: stored entries, all older than every query, then new.

    Attributes:
        q: (Hq, Q, key_dim). k: (Hkv, N, key_dim). v: (Hkv, N, value_dim); any strides.
        q_pos: (Q,) int32, positions of the new tokens, ascending.
        shape: of the attention.
        past_pos: (Hkv, n_past) or (1, n_past) int32, positions of the stored entries, -1 where there is none (ragged
            heads); None: nothing is stored.
        past_log_masses: (Hkv or 1, n_past) float32, added to the logits of the stored entries after the softcap;
            None: all 0.
        colsum: how to reduce the query heads of a group in the column sums; None: none are made.
        decay: factor on the column sums of all earlier queries at each query, above 0 to 1.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    q_pos: Tensor
    shape: AttentionShape
    past_pos: Tensor | None = None
    past_log_masses: Tensor | None = None
    colsum: Reduce | None = None
    decay: float = 1.0


class PrefillOutput(NamedTuple):
    """What the queries found, and what the columns received.

    colsum[g, j] = sum_i decay**(Q - 1 - i) reduce_h A[h, i, j] over the queries i and the query heads h of KV head g.
    """

    out: Tensor  #: (Hq, Q, value_dim) in q's dtype
    lse: Tensor  #: (Hq, Q) float32, the log of the denominator (sink included)
    colsum: Tensor | None  #: (Hkv, N) float32, or None


@dataclass(frozen=True, slots=True)
class WindowSignalArgs(OfQueries):
    """A few queries w of one sequence, and N entries in any order.

    Attributes:
        q: (Hq, w, key_dim). k: (Hkv, N, key_dim). q_pos: (w,) int32. k_pos: (Hkv, N) int32, -1 for none.
        shape: of the attention.
        reduce: the query heads of a group.
        log_masses: (Hkv or 1, N) float32 or None, added to the logits of the entries.
        lse: (Hq, w) float32, the log of each denominator, if it is known, sink included; with it the window hides
            entries and leaves the others what they had.
    """

    q: Tensor
    k: Tensor
    q_pos: Tensor
    k_pos: Tensor
    shape: AttentionShape
    reduce: Reduce = Reduce.MEAN
    log_masses: Tensor | None = None
    lse: Tensor | None = None
