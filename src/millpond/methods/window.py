"""window: the baseline that keeps the newest entries."""

from typing import Annotated

from millpond.methods import method
from millpond.methods._options import EvictAlways
from millpond.option_ranges import POSITIONS
from millpond.policy.policy import Policy
from millpond.policy.protect import Protect
from millpond.policy.scores.attention import Recency


@method("window")
def window(
    sinks: Annotated[int, "first positions that always stay; 0 is the plain sliding window", POSITIONS] = 0,
    decode: EvictAlways = "evict",
) -> Policy:
    """Keep the newest entries: s_j = position of j."""
    return Policy(score=Recency(), protect=Protect(sinks=sinks), every_step=decode == "evict", once=decode == "once")
