"""Policies that score tokens by the entropy of the model's predictions (SirLLM)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from millpond.errors import OptionError
from millpond.kernels.decode_rules import DecodeRule, Evict, Signal
from millpond.policy.needs.declared import Entropies, Needs
from millpond.policy.policy import Policy
from millpond.policy.scores.attention import Queries
from millpond.policy.view import View


@dataclass(frozen=True, slots=True)
class TokenEntropy:
    """s_j = -log P(x_j | x_<j): what the model's own prediction gave the token that came.

    The first token of a text was predicted by nothing, and counts as the least expected of all.
    """

    queries: Queries = "none"
    window: int = 0
    signal: Signal = Signal.NONE
    evict: Evict = Evict.ACC

    def score(self, view: View, seed: int) -> Tensor:
        assert view.signal is not None, "the cache passes the entropies stored with the entries"
        return view.signal


@dataclass(frozen=True, slots=True)
class EntropyPolicy(Policy):
    """Scores come from the model's predictions, which are known when a pass ends, and are stored with the entries.

    Attributes:
        decay: factor on every stored score when another round of a dialogue begins.
    """

    decay: float = 1.0

    def __post_init__(self) -> None:
        Policy.__post_init__(self)
        if not 0 < self.decay <= 1:
            raise OptionError(f"decay={self.decay:g} must lie in (0, 1]; 1 forgets nothing")
        if not isinstance(self.score, TokenEntropy) or self.protect.newest(1) < 1:
            raise OptionError("a method that needs the model's predictions cannot be the score of another method")

    @property
    def needs(self) -> Needs:
        return Needs(entropies=Entropies(self.decay))

    @property
    def gathers(self) -> bool:
        """The scores are stored with the entries."""
        return True

    @property
    def needs_all_layers(self) -> bool:
        """Nothing can leave before the model has predicted all tokens of the prompt."""
        return True

    def decode_rule(self, layer: int) -> DecodeRule:
        """The lowest stored score leaves; the scores of all heads are the same, so each may read its own."""
        return replace(Policy.decode_rule(self, layer), shared=False)
