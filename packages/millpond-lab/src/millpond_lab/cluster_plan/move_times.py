"""Seconds for which a move of a cache occupies the engines of both sides, between two of their steps."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MoveTimes:
    """What a move costs the engines; 0 by default, as where devices copy by themselves.

    Attributes:
        pack_base, pack_per_byte: seconds in the engine that read the prompt, for each move and each byte of the cache.
        take_base, take_per_byte: likewise in the engine that decodes.

    Example:
        >>> MoveTimes(pack_base=0.004, pack_per_byte=1e-8).packing(1_000_000)
        0.014
    """

    pack_base: float = 0.0
    pack_per_byte: float = 0.0
    take_base: float = 0.0
    take_per_byte: float = 0.0

    def packing(self, n_bytes: int) -> float:
        """Seconds in which the engine that has read a prompt turns its cache of `n_bytes` into a message."""
        return self.pack_base + self.pack_per_byte * n_bytes

    def taking_in(self, n_bytes: int) -> float:
        """Seconds in which the engine that decodes takes such a cache in."""
        return self.take_base + self.take_per_byte * n_bytes


#: Moves that occupy no engine.
FREE_MOVES = MoveTimes()
