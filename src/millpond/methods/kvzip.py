"""KVzip: entries that the model needs to reconstruct its context (Kim et al., 2025, arXiv:2505.23416)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from torch import Tensor

from millpond.errors import OptionError
from millpond.kernels.decode_rules import Evict, Signal
from millpond.methods import method
from millpond.methods._base import MAX_TEXT
from millpond.methods._options import Sinks
from millpond.option_ranges import SHARE, SOME_POSITIONS, brief
from millpond.policy.head_allocation import Ada
from millpond.policy.layer_allocation import AcrossLayers, EvenLayers
from millpond.policy.needs import Needs, PromptRepeat, TokenSource
from millpond.policy.policy import Policy
from millpond.policy.protect import Protect
from millpond.policy.scores.attention import Queries
from millpond.policy.token_classes import ID_DIGITS, IDS
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
    """

    ask: str = ""
    ids: tuple[int, ...] | None = None
    chunk: int = 2048

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
        return Needs(token_ids=True, prompt_repeat=PromptRepeat(self.ids, self.chunk))

    @property
    def gathers(self) -> bool:
        """The scores are stored with the entries."""
        return True

    def with_tokens(self, source: TokenSource) -> ReconstructionPolicy:
        return self if self.ids is not None else replace(self, ids=source.spell(self.ask))


@method("kvzip", paper="arXiv:2505.23416")
def kvzip(
    ask: Annotated[str, "prompt of the repetition; or token ids such as 5;6; or none"] = "Repeat the previous context:",
    chunk: Annotated[int, "tokens that are repeated in one pass", SOME_POSITIONS] = 2048,
    alpha: Annotated[float, "share of the budget that every head is guaranteed, 0 to 1", SHARE] = 0.0,
    across: Annotated[bool, "the heads of all layers compete (the paper); else every layer has its budget"] = True,
    sinks: Sinks = 4,
) -> Policy:
    """Keep the entries attended to when the model repeats its context, for any later question.

    After a prompt the model reads it once more (without the token that marks a text's beginning), behind a question
    for it and over its own cache. s_j = max_i max_h A_hij over the tokens i of question and repetition and the query
    heads h of the KV head (Equation 2). The heads of all layers compete for the budget of the model, so that one
    layer may hold several times as much as another; no layer is guaranteed more than its sinks. across=false gives
    every layer the same total, for which its heads compete. The repetition is taken back, costs about a second prefill,
    and changes no output.

    Departs from the paper: there the softmax is over the repeated chunk and the question alone; here it is the model's
    own, over everything held, and every entry counts in every pass. Each later turn, and each chunk of a prompt in
    chunks, is repeated when it ends, with what was decoded before it; older entries keep the larger of their scores.
    Not for assisted generation.
    """
    if len(ask) > MAX_TEXT:
        raise OptionError(f"kvzip: ask={brief(ask)} has {len(ask):,} characters and may have {MAX_TEXT:,}")
    parts = [] if ask == "none" else ask.split(";")
    are_ids = all(part.isdecimal() for part in parts)
    ids = tuple(int(part) if len(part) <= ID_DIGITS else -1 for part in parts) if are_ids else None
    if ids and not all(IDS.holds(token_id) for token_id in ids):
        raise OptionError(f"kvzip: ask={brief(ask)}: token ids must be {IDS}")
    protect = Protect(sinks=sinks)
    return ReconstructionPolicy(
        score=Rebuilt(),
        protect=protect,
        heads=Ada(alpha),
        layers=AcrossLayers(protect) if across else EvenLayers(),
        every_step=False,
        ask=ask,
        ids=ids,
        chunk=chunk,
    )
