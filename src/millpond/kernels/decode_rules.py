"""Accumulation and eviction rules of a decoding step, as plain numbers for kernels."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Signal(IntEnum):
    """What the decode kernel writes into the score accumulator of each stored entry."""

    NONE = 0  #: nothing: the accumulator is not read or written
    SUM = 1  #: acc <- decay * acc + p
    LAST = 2  #: acc <- p, the attention of the newest query alone


class Reduce(IntEnum):
    """How the attention of the query heads of one GQA group becomes one number p per entry of the KV head."""

    MEAN = 0
    MAX = 1
    SUM = 2


class Evict(IntEnum):
    """Which unprotected entry leaves when a region is full. The lowest value goes; ties go to the oldest."""

    NEVER = 0  #: the region grows
    ACC = 1  #: the accumulator
    ACC_MEAN = 2  #: the accumulator over the number of queries that saw the entry, acc / (query_pos - pos + 1)
    OLDEST = 3  #: the position
    RANDOM = 4  #: a hash of (seed, region head, position): a uniform sample that no batch or order changes
    HEAVIEST = 5  #: the accumulator turned round: the highest goes
    SPACED = 6  #: the worth of the position in a pattern, see `Spacing`

    @property
    def by_score(self) -> bool:
        """Whether the accumulator says it."""
        return self in (Evict.ACC, Evict.ACC_MEAN, Evict.HEAVIEST)


@dataclass(frozen=True, slots=True)
class Spacing:
    """A pattern of positions: unit n holds positions (n - shift) * width .. (n - shift + 1) * width - 1.

    A position is worth 1 where its unit's number is a multiple of `stride` and 0 elsewhere; with stride 0 it is worth
    the largest power of two that divides that number, and 2**31 where the number is 0.
    """

    width: int = 1
    shift: int = 0
    stride: int = 0


@dataclass(frozen=True, slots=True)
class DecodeRule:
    """The part of a policy that runs inside the decode kernel.

    Attributes:
        signal: what goes into the accumulator.
        reduce: reduction over the query heads of a group, applied to each query's probabilities.
        evict: which entry leaves when a region holds as many entries as its cap.
        decay: factor on the old accumulator per step, for `Signal.SUM`.
        sinks: entries with position < sinks never leave.
        shared: all KV heads of a sequence drop the same entry: the value is averaged over the KV heads first.
            Their regions must hold the same positions in the same slots.
        seed: of `Evict.RANDOM`. spacing: of `Evict.SPACED`.
    """

    signal: Signal = Signal.NONE
    reduce: Reduce = Reduce.MEAN
    evict: Evict = Evict.NEVER
    decay: float = 1.0
    sinks: int = 0
    shared: bool = False
    seed: int = 0
    spacing: Spacing = Spacing()


#: Keep everything, gather nothing.
KEEP_ALL = DecodeRule()

#: A cap that no region reaches: the largest int32.
UNBOUNDED = 2**31 - 1
