"""A lower bound on the time of a block, without a linear program, so that a search solves few of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from millpond.engine.offload.cost import PLACES, BlockShape, CostModel, Term
from millpond.engine.offload.plan import DEVICE, DISK, HOST

#: Rounding of the programs, whose solutions may be that much below what is exact.
_ROUNDING = 1e-6


def least_seconds(cost: CostModel, block: BlockShape, room: Mapping[str, float], free: Collection[str]) -> float:
    """Seconds that a block takes at least, whatever its shares.

    Each term of a sweep is made as small as it can be alone: weights and KV each fill the place where they cost it
    least, as far as that place has room for them alone, then the next place. No sweep is shorter than the largest of
    these terms.

    Args:
        room: bytes of each of `DEVICE` and `HOST`. free: those of `PLACES` that may be more than 0.

    Returns:
        Infinity where a kind finds no room at all.
    """
    bytes_of = cost.bytes(block)
    left = {tier: room[tier] - sum(term.constant for term in bytes_of[tier]) for tier in (DEVICE, HOST)}
    most = [_most(index, bytes_of, left) if place in free else 0.0 for index, place in enumerate(PLACES)]
    if sum(most[:3]) < 1 - _ROUNDING or sum(most[3:]) < 1 - _ROUNDING:
        return float("inf")
    course = cost.course(block)
    sweeps = ((course.prefill, cost.prefill), (course.decode, cost.decode))
    seconds = sum(n * max(_least(term, most) for term in terms(block)) for n, terms in sweeps if n)
    return float(seconds) * (1 - _ROUNDING)


def _most(index: int, bytes_of: Mapping[str, list[Term]], left: Mapping[str, float]) -> float:
    """The largest share of a place."""
    tier = PLACES[index].partition(" ")[2]
    if tier == DISK:
        tier = HOST  # a disk has room; what is on its way there takes memory
    n_bytes = sum(term.shares[index] for term in bytes_of[tier])
    if left[tier] < 0:
        return 0.0
    return 1.0 if n_bytes <= left[tier] else left[tier] / n_bytes


def _least(term: Term, most: Sequence[float]) -> float:
    """A term with the shares that are best for it alone."""
    found = term.constant
    for kind in (range(3), range(3, 6)):
        rest = 1.0
        for index in sorted(kind, key=lambda at: term.shares[at]):
            share = min(most[index], rest)
            found += term.shares[index] * share
            rest -= share
    return found
