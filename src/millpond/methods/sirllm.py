"""SirLLM: tokens of highest entropy as memory (Yao et al., ACL 2024, arXiv:2405.12528)."""

from typing import Annotated, Literal

from millpond.methods import method
from millpond.methods._options import Sinks
from millpond.option_ranges import POSITIONS, SHARE, Range
from millpond.policy.protect import Protect
from millpond.policy.variants.token_entropy import EntropyPolicy, TokenEntropy


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
    """Keep the tokens that surprised the model, the first and the newest ones, the same in all layers and heads.

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
