"""Scores that small trained networks give an entry when it is written (Locret)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from millpond.kernels.decode_rules import Evict, Signal
from millpond.policy.retaining.heads import RetainingHeads
from millpond.policy.scores.attention import Queries
from millpond.policy.scores.wrapped import WrappedScore
from millpond.policy.view import View

#: The heads of a model, given those that were named (None: none were).
FindHeads = Callable[[RetainingHeads | None], RetainingHeads]


@dataclass(frozen=True, slots=True, eq=False)
class Retained:
    """s_j = the score that entry j was given when it was written, by a network over its own query, key and value.

    Attributes:
        heads: the networks; None until a model says which are its own.
        expecting: scores are the labels that the networks expect, so that heads compare; else each head's quantiles.
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
    """The score by retaining heads that `score` is or builds on; None for any other."""
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
