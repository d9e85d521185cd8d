"""Scores of entries by trained gates or retaining heads, given when an entry is written (Attention-Gate, Locret)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from millpond.kernels.decode_rules import Evict, Signal
from millpond.policy.scores.attention import Queries, innermost, with_innermost
from millpond.policy.trained.networks import Gates, RetainingHeads
from millpond.policy.view import View

#: The gates of a model, given those that were named (None: none were).
FindGates = Callable[[Gates | None], Gates]


@dataclass(frozen=True, slots=True, eq=False)
class Gated:
    """p_j = the probability of entry j when it was written, by its token and earlier text.

    Attributes:
        gates: Gates of the model; None until a model provides them.
    """

    gates: Gates | None = None
    queries: Queries = "none"
    window: int = 0
    signal: Signal = Signal.NONE
    evict: Evict | None = None

    def score(self, view: View, seed: int) -> Tensor:
        assert view.signal is not None, "the cache passes the scores stored with the entries"
        return view.signal


#: The heads of a model, given those that were named (None: none were).
FindHeads = Callable[[RetainingHeads | None], RetainingHeads]


@dataclass(frozen=True, slots=True, eq=False)
class Retained:
    """s_j = the score of entry j when it was written, by a network over its own q, k, v.

    Attributes:
        heads: Retaining heads of the model; None until a model provides them.
        expecting: Scores are the labels that the networks expect, so that heads compare; else each head's quantiles.
    """

    heads: RetainingHeads | None = None
    expecting: bool = False
    queries: Queries = "none"
    window: int = 0
    signal: Signal = Signal.NONE
    evict: Evict | None = Evict.ACC

    def score(self, view: View, seed: int) -> Tensor:
        assert view.signal is not None, "the cache passes the scores stored with the entries"
        return view.signal


def retained(score: object) -> Retained | None:
    """Return the score by retaining heads that `score` is or builds on; None for any other."""
    score = innermost(score)
    return score if isinstance(score, Retained) else None


def with_heads(score: Any, find: FindHeads) -> Any:
    """Return `score` with the heads of a model instead of those that it named."""
    own_score = retained(score)
    if own_score is None:
        return score
    heads = find(own_score.heads)
    return with_innermost(score, replace(own_score, heads=heads.expecting() if own_score.expecting else heads))
