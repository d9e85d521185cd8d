"""Scores that a trained gate gives an entry when it is written: how surely its KV head keeps it (Attention-Gate)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from millpond.kernels.decode_rules import Evict, Signal
from millpond.policy.retaining.gates import Gates
from millpond.policy.scores.attention import Queries
from millpond.policy.view import View

#: The gates of a model, given those that were named (None: none were).
FindGates = Callable[[Gates | None], Gates]


@dataclass(frozen=True, slots=True, eq=False)
class Gated:
    """p_j = the probability that entry j was given when it was written, from its token and the text before it.

    Attributes:
        gates: the networks; None until a model says which are its own.
    """

    gates: Gates | None = None
    queries: Queries = "none"
    window: int = 0
    signal: Signal = Signal.NONE
    evict: Evict | None = None

    def score(self, view: View, seed: int) -> Tensor:
        assert view.signal is not None, "the cache passes the scores stored with the entries"
        return view.signal
