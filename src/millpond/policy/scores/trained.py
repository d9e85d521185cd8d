"""Scores that trained gates or retaining heads give an entry when it is written (Attention-Gate, Locret)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from millpond.kernels.decode_rules import Evict, Signal
from millpond.policy.scores.attention import Queries, WrappedScore
from millpond.policy.trained.networks import Gates, RetainingHeads
from millpond.policy.view import View

#: The gates of a model, given those that were named (None: none were).
FindGates = Callable[[Gates | None], Gates]


@dataclass(frozen=True, slots=True, eq=False)
class Gated:
    """p_j = the probability that entry j was given when it was written, from its token and the text before it.

    Attributes:
        gates: The networks; None until a model says which are its own.
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
    """s_j = the score that entry j was given when it was written, by a network over its own query, key and value.

    Attributes:
        heads: The networks; None until a model says which are its own.
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
    while isinstance(score, WrappedScore):
        score = score.base
    return score if isinstance(score, Retained) else None


def with_heads(score: Any, find: FindHeads) -> Any:
    """`score` with the heads of a model in place of those that it named."""
    if isinstance(score, WrappedScore):
        return replace(score, base=with_heads(score.base, find))
    own = retained(score)
    if own is None:
        return score
    heads = find(own.heads)
    return replace(own, heads=heads.expecting() if own.expecting else heads)
