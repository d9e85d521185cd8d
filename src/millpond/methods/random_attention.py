"""Random Attention: the prompt stays, the rest is drawn anew each round (Wang et al., 2026, arXiv:2609.03430)."""

from typing import Annotated

from millpond.methods import method
from millpond.methods._options import PlannedDecode, PromptStays, RoundLength
from millpond.option_ranges import POSITIONS, SEEDS
from millpond.policy.policy import Policy
from millpond.policy.protect import Protect
from millpond.policy.scores.draws import RandomRound


@method("random_attention", paper="arXiv:2609.03430")
def random_attention(
    prompt: PromptStays = True,
    recent: Annotated[int, "newest entries that stay (the paper's buffer r)", POSITIONS] = 64,
    every: RoundLength = 64,
    sinks: Annotated[int, "first positions that stay where the prompt does not", POSITIONS] = 4,
    seed: Annotated[int, "same seed, same draws, whatever the batch", SEEDS] = 0,
    decode: PlannedDecode = "evict",
) -> Policy:
    """Keep the prompt, and a uniform sample of the rest that is drawn anew each round.

    While decoding `every` entries gather. Then each entry but those of the prompt and the newest ones gets a random
    number, another one in each KV head and round, and the best stay, so that the budget is met. An entry survives m
    rounds with ((K - l) / (K + r - l))^m, of l tokens in the prompt and K entries without the buffer of r: old entries
    become rare. It is the control that a method with a score has to beat at the same budget and the same protection of
    the prompt.

    `random` draws one number per entry for good, which samples the whole text evenly.

    Departs from the paper: the budget counts the newest entries too (there they come on top of K). A prompt that leaves
    no place free beside them is drawn from like the rest, but for the sinks, where the paper has no such case; so are,
    in a conversation, older turns that do not fit any more.
    """
    return Policy(
        score=RandomRound(),
        protect=Protect(sinks=sinks, recent=recent, prompt=prompt),
        every_step=decode == "evict",
        plan_every=every if decode == "evict" else 1,
        seed=seed,
    )
