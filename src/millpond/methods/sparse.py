"""strided and fixed: sparse patterns (Child et al., 2019, arXiv:1904.10509), the baselines of H2O's table 2."""

from typing import Annotated, Literal

from millpond.errors import OptionError
from millpond.methods import method
from millpond.methods._options import Recent, Sinks
from millpond.option_ranges import POSITIONS, SHARE, SOME_POSITIONS
from millpond.policy.policy import Policy
from millpond.policy.protect import Protect
from millpond.policy.scores.strided import Strided


@method("strided", paper="arXiv:1904.10509")
def strided(
    stride: Annotated[int, "every stride-th position stays; 0: the stride that the budget asks for", POSITIONS] = 0,
    heavy: Annotated[float, "share of the budget for heavy hitters, 0 to 1; 0 is the pattern alone", SHARE] = 0.0,
    recent: Recent = 0.5,
    sinks: Sinks = 0,
) -> Policy:
    """Keep the newest entries and every s-th one before them, whatever the text says.

    Departs from the paper: there each query sees the positions whose distance to it is a multiple of s, which moves
    with the query; a cache cannot bring back what it evicted, so the positions that are multiples of s stay. With
    stride=0 s is a power of two that doubles as the text grows. Where a stride leaves more than fits, the oldest
    leave; where it leaves room, the newest fill it.

    For study. With heavy hitters each step ends with a plan instead of the kernel's eviction, and is slow.
    """
    return _pattern("strided", Strided(stride=stride, heavy=heavy), recent, sinks)


@method("fixed", paper="arXiv:1904.10509")
def fixed(
    width: Annotated[int, "positions at the end of each block that stay", SOME_POSITIONS] = 4,
    block: Annotated[
        int, "length of a block, a multiple of width; 0: the length that the budget asks for", POSITIONS
    ] = 0,
    heavy: Annotated[float, "share of the budget for heavy hitters, 0 to 1; 0 is the pattern alone", SHARE] = 0.0,
    recent: Recent = 0.5,
    sinks: Sinks = 0,
) -> Policy:
    """Keep the newest entries and the last few of every block of the text before them.

    Departs from the paper: the block that is being read is the recent window here. With block=0 its length is
    width times a power of two, which doubles as the text grows.

    For study. With heavy hitters each step ends with a plan instead of the kernel's eviction, and is slow.
    """
    if block % width:
        raise OptionError(f"fixed: block={block} must be a multiple of width={width}")
    return _pattern("fixed", Strided(width, block // width, "last", heavy), recent, sinks)


def _pattern(name: Literal["strided", "fixed"], score: Strided, recent: int | float, sinks: int) -> Policy:
    share = recent if isinstance(recent, float) else 0.0
    if not 0 <= score.heavy <= 1 - share:
        raise OptionError(
            f"{name}: heavy={score.heavy} must lie in 0..{1 - share:g}, what recent={recent} leaves of the budget"
        )
    return Policy(score=score, protect=Protect(sinks=sinks, recent=recent))
