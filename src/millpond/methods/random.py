"""random: the baseline that keeps a uniform sample."""

from typing import Annotated, Literal

from millpond.methods import method
from millpond.policy.policy import Policy
from millpond.policy.protect import Protect
from millpond.policy.scores.attention import RandomPriority


@method("random")
def random(
    seed: Annotated[int, "same seed, same sample, whatever the batch or the chunks"] = 0,
    recent: Annotated[int | float, "newest entries that stay: a share of the budget (0.1) or a count (16)"] = 0.1,
    sinks: Annotated[int, "first positions that always stay"] = 4,
    decode: Annotated[
        Literal["evict", "grow", "once"],
        "after the prompt: evict at each step, grow until the next prompt ends, or never evict again",
    ] = "evict",
) -> Policy:
    """Keep a uniform random sample beside the sinks and the newest entries.

    Each entry gets a fixed random priority, a hash of (seed, layer, head, position), and the lowest leaves: what is
    kept is a uniform sample of everything seen so far (reservoir sampling).
    """
    return Policy(
        score=RandomPriority(),
        protect=Protect(sinks=sinks, recent=recent),
        every_step=decode == "evict",
        once=decode == "once",
        seed=seed,
    )
