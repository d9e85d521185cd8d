"""Policies whose plans use a second reading: the model repeats each prompt or turn over its own cache (KVzip)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from millpond.errors import OptionError
from millpond.kernels.decode_rules import Evict, Signal
from millpond.policy.layer_allocation import AcrossLayers
from millpond.policy.needs import Needs, PromptRepeat, TokenSource
from millpond.policy.policy import Policy
from millpond.policy.scores.attention import Queries
from millpond.policy.view import View


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """s_j = max_i max_h A_hij over queries i that repeat the prompt, h of the group."""

    queries: Queries = "none"
    window: int = 0
    signal: Signal = Signal.NONE
    evict: Evict | None = None

    def score(self, view: View, seed: int) -> Tensor:
        assert view.signal is not None, "the cache provides what the repetition found"
        return view.signal


@dataclass(frozen=True, slots=True)
class ReconstructionPolicy(Policy):
    """Policy whose plans use the attention of the model repeating each prompt or turn.

    Attributes:
        ask: Text that asks for the repetition.
        ids: The same as token ids; None: not known yet.
        chunk: Tokens that are repeated in one pass.
        queries: Queries of the repetition that plans see, see `PromptRepeat`.
    """

    ask: str = ""
    ids: tuple[int, ...] | None = None
    chunk: int = 2048
    queries: int = 0

    def __post_init__(self) -> None:
        Policy.__post_init__(self)
        if self.chunk < 1:
            raise OptionError(f"chunk={self.chunk} must be at least 1")
        even = isinstance(self.layers, AcrossLayers) or not self.needs_all_layers
        plain = self.prefill == "once" and not self.every_step and even and self.positions == "absolute"
        if not (plain and isinstance(self.score, Rebuilt)):
            raise OptionError("a method that lets the model repeat its prompt cannot be the score of another method")

    @property
    def needs(self) -> Needs:
        return Needs(token_ids=True, prompt_repeat=PromptRepeat(self.ids, self.chunk, self.queries))

    @property
    def gathers(self) -> bool:
        """The scores are stored with the entries."""
        return True

    def with_tokens(self, source: TokenSource) -> ReconstructionPolicy:
        return self if self.ids is not None else replace(self, ids=source.spell(self.ask))
