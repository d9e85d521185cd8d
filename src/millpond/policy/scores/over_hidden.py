"""Scores of entries by networks over hidden states, given when an entry is written (KVzap, Fast KVzip)."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from millpond.kernels.decode_rules import Evict, Signal
from millpond.policy.scores.attention import Queries, innermost, with_innermost
from millpond.policy.trained.hidden_networks import HiddenNetworks
from millpond.policy.trained.kinds import NetworkKind
from millpond.policy.view import View


@dataclass(frozen=True, slots=True, eq=False)
class OverHidden:
    """s_j = the score of entry j when it was written, by its token's hidden state.

    Attributes:
        kinds: Kinds of networks that the method takes.
        networks: Networks of the model; None until a model provides them.
        evict: The stored score decides while decoding; None: plans do.
    """

    kinds: Collection[NetworkKind]
    networks: HiddenNetworks | None = None
    evict: Evict | None = Evict.ACC
    queries: Queries = "none"
    window: int = 0
    signal: Signal = Signal.NONE

    def score(self, view: View, seed: int) -> Tensor:
        assert view.signal is not None, "the cache passes the scores stored with the entries"
        return view.signal


#: The networks of a model, given the score that needs them and names its own, or none.
FindNetworks = Callable[[OverHidden], HiddenNetworks]


def over_hidden(score: object) -> OverHidden | None:
    """Return the score over hidden states that `score` is or builds on; None for any other."""
    score = innermost(score)
    return score if isinstance(score, OverHidden) else None


def with_networks(score: Any, find: FindNetworks) -> Any:
    """Return `score` with the networks of a model instead of those that it named."""
    own_score = over_hidden(score)
    return score if own_score is None else with_innermost(score, replace(own_score, networks=find(own_score)))
