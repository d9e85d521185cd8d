"""Merge rules for evicted entries, as plain numbers for kernels."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from millpond.errors import OptionError


class Weigh(IntEnum):
    """How much of an entry e goes into an entry c that stays; u is how alike the two are.

    With CHANCE an entry goes to the next entries by position, with all others to the one that is most like it. Of
    several that are equally alike it is the oldest. An entry that stands for m others counts m times, except in COUNT.
    """

    NORMS = 0  #: w_e = u |v_e| / (|v_e| + |v_c|), w_c = 1; values become the weighted mean, keys stay
    EXP = 1  #: w_e = exp(u), w_c = e; keys and values become the weighted mean
    COUNT = 2  #: keys and values become (x_c + sum_e u x_e) / (1 + how many e there are)
    SCORE = 3  #: w = the value by which entries leave; values, directions and lengths of keys become means
    CHANCE = 4  #: v_c += p_e v_e / n for each of the n next entries; keys stay


class Over(IntEnum):
    """What the attention of an entry is divided by to give p, at most 1, for `Weigh.CHANCE`."""

    TARGETS = 0  #: the mean over the next entries
    RECENT = 1  #: the mean over all entries that stay and are open
    MAX = 2  #: the largest of all that stay


@dataclass(frozen=True, slots=True)
class MergeRule:
    """The part of a merging policy that runs inside `ops.merge_slots`.

    u is the cosine of the keys; for `Weigh.SCORE` the product of those of keys and values, -1 unless both are above 0.

    Attributes:
        weigh: see there.
        closed: entries at positions below take nothing in, except by CHANCE.
        threshold: entries are dropped if u < threshold (NORMS), or u <= threshold (SCORE).
        rate: for EXP and COUNT the threshold of a sequence is the mean of u at its first merge, and moves by this
            share towards the mean at each later one.
        cover, most: for SCORE only the best entries that make up `cover` of a head's sum are merged, and no more than
            `most` times as many as stay.
        targets: for CHANCE, how many entries take one in; 0: all that come after it.
        over: for CHANCE. average: attention there is that per query that saw the entry.
        draw: p is drawn: 1 where the entry's hash of `Evict.RANDOM` over 2^24 is below p, else 0.
        bias: for CHANCE: p masses go along with the value, and v_c becomes the mean by mass; needs `masses`.
        masses: log masses are read and written; else every entry counts once.
    """

    weigh: Weigh
    closed: int = 0
    threshold: float = 0.0
    rate: float = 1.0
    cover: float = 1.0
    most: float = 0.0
    targets: int = 0
    over: Over = Over.TARGETS
    average: bool = False
    draw: bool = False
    bias: bool = False
    masses: bool = False

    def __post_init__(self) -> None:
        if self.bias and not self.masses:
            raise OptionError("a merge by mass (bias=True) needs slots that have masses (masses=True)")

    @property
    def moves(self) -> bool:
        """The threshold is that of each sequence, and moves."""
        return self.weigh in (Weigh.EXP, Weigh.COUNT)


#: Cosines that differ by less are the same number, rounded in two ways.
ROUNDING = 1e-6
