"""Combined global and local attention: over the whole text, and over the newest queries (EMS)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from millpond.kernels.decode_rules import Evict, Signal
from millpond.kernels.merge.reference import blend
from millpond.policy.scores.attention import Queries
from millpond.policy.view import View


@dataclass(frozen=True, slots=True)
class GlobalAndLocal:
    """s_j = max(g_j, l_j * mean(g) / mean(l)), pooled by the maximum over `kernel` neighbouring entries.

    g is the attention from all queries, l that of the last `window`. Over a whole prompt of n tokens the factor is
    n / window exactly.
    """

    window: int = 32
    kernel: int = 1
    queries: Queries = "both"
    signal: Signal = Signal.SUM
    evict: Evict | None = None

    def score(self, view: View, seed: int) -> Tensor:
        assert view.signal is not None, "the cache provides the signal that a score declares"
        overall, local = (x.masked_fill(~view.valid, 0) for x in (view.signal, view.window_signal))
        best = blend(overall, local)
        if self.kernel == 1:
            return best
        return F.max_pool1d(best[None], self.kernel, stride=1, padding=self.kernel // 2)[0]
