"""random: the baseline that keeps a uniform sample."""

from typing import Annotated

from millpond.methods import method
from millpond.methods._options import EvictAlways, Recent, Sinks
from millpond.option_ranges import SEEDS
from millpond.policy.policy import Policy
from millpond.policy.protect import Protect
from millpond.policy.scores.attention import RandomPriority


@method("random")
def random(
    seed: Annotated[int, "same seed, same sample, whatever the batch or the chunks", SEEDS] = 0,
    recent: Recent = 0.1,
    sinks: Sinks = 4,
    decode: EvictAlways = "evict",
) -> Policy:
    """Keep a uniform random sample besides the sinks and the newest entries.

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
