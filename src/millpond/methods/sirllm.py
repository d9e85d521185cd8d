"""SirLLM: tokens of highest entropy as memory (Yao et al., ACL 2024, arXiv:2405.12528)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal

from torch import Tensor

from millpond.errors import OptionError
from millpond.kernels.decode_rules import DecodeRule, Evict, Signal
from millpond.methods import method
from millpond.methods._options import Sinks
from millpond.option_ranges import POSITIONS, SHARE, Range
from millpond.policy.needs import Entropies, Needs
from millpond.policy.policy import Policy
from millpond.policy.protect import Protect
from millpond.policy.scores.attention import Queries
from millpond.policy.view import View


@dataclass(frozen=True, slots=True)
class TokenEntropy:
    """s_j = -log P(x_j | x_<j), the model's own prediction of the token that came.

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
    """Policy that scores tokens by the model's predictions, known at the end of a pass.

    Attributes:
        decay: Factor on every stored score when another round of a dialogue begins.
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
        """True: the scores are stored with the entries."""
        return True

    @property
    def needs_all_layers(self) -> bool:
        """True: nothing can leave before the model has predicted all tokens of the prompt."""
        return True

    def decode_rule(self, layer: int) -> DecodeRule:
        """Return the rule by which the lowest stored score leaves.

        The scores of all heads are the same, so each may read its own.
        """
        return replace(Policy.decode_rule(self, layer), shared=False)


@method("sirllm", paper="arXiv:2405.12528")
def sirllm(
    decay: Annotated[
        float,
        "factor on what is remembered when another round of a dialogue begins, above 0 to 1",
        Range(0.0, 1.0, above=True),
    ] = 1.0,
    recent: Annotated[
        int | float, "newest entries that stay: a share of the budget (0.25) or a count (128)", POSITIONS, SHARE
    ] = 0.25,
    sinks: Sinks = 4,
    decode: Annotated[Literal["evict", "grow"], "after the prompt: evict at each step, or grow"] = "evict",
) -> EntropyPolicy:
    """Keep the tokens that surprised the model, in all layers and heads.

    The first and the newest ones stay too.

    The score of token j is e_j = -log P(x_j | x_<j), by the model's own prediction when it came. A round is a prompt
    and what is decoded after it; when the next one begins, every stored e_j is multiplied by `decay` (the paper's
    dialogues run at 1, 0.9 and 0.7). Predictions are known when a pass ends, so a prompt is held whole until then;
    its logits are computed for every token (prefill_chunk_size bounds both). Not for assisted generation.

    Departs from the paper: it makes room once per round, for what comes, and keeps no recent window by itself; here
    the budget holds at every step, so the newest share of it stays (recent=0, decode="grow" is the paper's rule) and
    the newest entry always does. Keys keep their positions; the paper closes the gaps. Its official code scores token
    j by the prediction for its predecessor, one place off; here it is the formula. The first token of a text, which
    nothing predicted, counts as the most surprising, there only as much as the most surprising of its pass.
    """
    return EntropyPolicy(
        score=TokenEntropy(),
        protect=Protect(sinks=sinks, recent=recent, grace=1),
        shared=True,
        every_step=decode == "evict",
        decay=decay,
    )
