"""Rules under test: those that predict for themselves, and those that are given bits from a replay."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cached_property

from millpond.cache.paging import PAGING
from millpond_lab.paging.replay import Path, ReplayResult, belady_bits, next_uses_of, phase_bits, replay

#: Rules with bits from a replay of the same trace: the rule, what its bits are, and the share of bits flipped.
WITH_BITS = {
    "mark0, Belady's bits": ("mark0", "belady", 0.0),
    "mark0, 5 % of them flipped": ("mark0", "belady", 0.05),
    "mark0, 20 % of them flipped": ("mark0", "belady", 0.2),
    "mark_predict, right phase bits": ("mark_predict", "phase", 0.0),
    "mark_predict, 5 % of them flipped": ("mark_predict", "phase", 0.05),
    "mark_predict, 20 % of them flipped": ("mark_predict", "phase", 0.2),
    "mark_predict, all of them flipped": ("mark_predict", "phase", 1.0),
    "learned, inverted bits": ("learned", "belady", 1.0),
    "learned, random bits": ("learned", "belady", 0.5),
    "learned, all discard": ("learned", "discard", 0.0),
    "learned, all keep": ("learned", "keep", 0.0),
    "learned, adversarial bits": ("learned", "used again", 0.0),
}
#: Rules with a theorem, and what its bits are.
THEOREMS = (("mark0", "belady"), ("mark_predict", "phase"))
_SEED = 0


class PagingTrace:
    """Requests and what a replay may know of them: next uses and Belady's bits for one size of the cache."""

    def __init__(self, requests: Sequence[Path], pages: int) -> None:
        self.requests, self.pages = requests, pages

    @cached_property
    def next_uses(self) -> list[int | None]:
        """For each access, see `next_uses_of`."""
        return next_uses_of(self.requests)

    @cached_property
    def belady(self) -> ReplayResult:
        """The best run."""
        return replay(self.requests, PAGING.get("belady")(), self.pages, next_uses=self.next_uses)

    def bits(self, kind: str, flipped: float, seed: int = _SEED) -> list[bool]:
        """For each access: Belady's bits, those of phases, all alike, or 1 exactly for pages that are used again.

        A share of them, drawn by the seed, is flipped.
        """
        if kind == "belady":
            bits = belady_bits(self.requests, self.belady.evicted, self.belady.evicted_at)
        elif kind == "phase":
            bits = phase_bits(self.requests, self.pages)
        elif kind == "used again":
            bits = [use is not None for use in self.next_uses]
        else:
            bits = [kind == "discard"] * sum(map(len, self.requests))
        draw = random.Random(seed)
        return [bit != (draw.random() < flipped) for bit in bits]

    def bound(self, candidate: str) -> float | None:
        """Return the misses that the paper's theorem allows one of `WITH_BITS`, see `bound_of`; None for no theorem."""
        rule, kind, flipped = WITH_BITS.get(candidate, ("", "", 0.0))
        return self.bound_of(rule, kind, self.bits(kind, flipped)) if (rule, kind) in THEOREMS else None

    def bound_of(self, rule: str, kind: str, bits: Sequence[bool]) -> float:
        """Return the misses that the paper's theorem allows a rule with bits of known errors.

        With eta0 pages called useful and eta1 called useless by mistake: OPT + 2 H_k eta0 + eta1 for `mark0` (Theorem
        1), 2 OPT + H_k eta0 + eta1 for `mark_predict` (Theorem 2), H_k = 1 + 1/2 + ... + 1/k for k pages. It is of
        mean misses where no page follows another.
        """
        pairs = list(zip(self.bits(kind, 0.0), bits, strict=True))
        eta0, eta1 = pairs.count((True, False)), pairs.count((False, True))
        harmonic = sum(1 / i for i in range(1, self.pages + 1))
        own = 2 * harmonic * eta0 if rule == "mark0" else harmonic * eta0 + self.belady.misses
        return self.belady.misses + own + eta1

    def run(self, candidate: str) -> ReplayResult:
        """Replay under a rule, or under one of `WITH_BITS`.

        Raises:
            OptionError: an unknown rule.
        """
        if candidate == "belady":
            return self.belady
        rule, kind, flipped = WITH_BITS.get(candidate, (candidate, "", 0.0))
        bits = self.bits(kind, flipped) if kind else None
        return replay(self.requests, PAGING.get(rule)(), self.pages, bits=bits)
