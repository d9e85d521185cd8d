"""Scores computed beforehand, outside the cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from millpond.errors import CacheMismatchError
from millpond.kernels.decode_rules import Evict, Signal
from millpond.policy.scores.attention import Queries
from millpond.policy.view import View

#: (layer, sequence, seen) -> (H, n) numbers by position, for a plan after `seen` tokens of that sequence of the batch.
Values = Callable[[int, int, int], Tensor]


@dataclass(frozen=True, slots=True)
class PrecomputedScore:
    """s_j = a given number for position j of each KV head; positions that none was given for stay before all others.

    Example:
        >>> table = torch.tensor([[0.1, 0.7, 0.2]])
        >>> view = View(torch.tensor([[0, 1, 2, 3]]), None, seen=4, layer=0)
        >>> PrecomputedScore(lambda layer, sequence, seen: table).score(view, 0).tolist()[0][1:]
        [0.699999988079071, 0.20000000298023224, inf]
    """

    values: Values
    queries: Queries = "none"
    window: int = 0
    signal: Signal = Signal.NONE
    evict: Evict | None = None

    def score(self, view: View, seed: int) -> Tensor:
        """
        Raises:
            CacheMismatchError: the numbers are of another number of KV heads.
        """
        table = self.values(view.layer, view.sequence, view.seen).to(view.positions.device)
        if len(table) != len(view.positions):
            raise CacheMismatchError(
                f"layer {view.layer} has {len(view.positions)} KV heads, the given scores are of {len(table)}"
            )
        table = torch.cat([table, table.new_full((len(table), 1), float("inf"))], 1)
        return table.gather(1, view.positions.long().clamp(0, table.shape[1] - 1))
