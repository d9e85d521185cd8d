"""Flags that act inside a prompt: which entries its queries see (Attention-Gate)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from millpond.policy.protect import SHORT_TURN_TOKENS


@dataclass(frozen=True, slots=True)
class PromptFlags:
    """Entries that the queries of a prompt see.

    Query i sees entry j <= i if j = i, j < sinks, i - j < window, or j is flagged.

    Attributes:
        threshold: An entry whose score is above it is flagged.
        sinks: First positions, which every query sees.
        window: Newest positions that a query sees, its own among them.
        chunk: Positions between two evictions of a prompt; 0 if there is none before its end.
    """

    threshold: float
    sinks: int
    window: int
    chunk: int = 0

    @property
    def band(self) -> int:
        """Newest positions that a query sees whatever their flags are: its own at least."""
        return max(self.window, 1)

    def act_within(self, window: int) -> bool:
        """Whether flags act in a layer whose queries see `window` positions, 0 for all.

        They do not where sinks and newest entries may be all that there is.
        """
        return not window or window > self.sinks + self.band

    def all_seen_until(self, turn: int) -> int:
        """Return the position of the first query of a turn that flags act on.

        The first tokens of a later turn, which may be all of it, see all that is stored, as decoded ones do.

        Args:
            turn: Position at which the turn begins; 0 for the first prompt.
        """
        return turn + SHORT_TURN_TOKENS if turn else 0

    def visible(self, scores: Tensor, positions: Tensor, first: int, turn: int) -> Tensor:
        """Return (H, N) bool: the entries that queries see at any distance.

        Besides sinks and flagged entries these are entries that were there before the turn and ones that a plan inside
        it has kept, such as those of a `floor`.

        Args:
            scores: (H, N), of the entries.
            positions: (H, N), of the entries; -1 for none.
            first: Position of the first query; no plan comes between it and the others.
            turn: Position at which their turn begins.
        """
        planned = first - first % self.chunk if self.chunk else 0
        if planned < self.all_seen_until(turn):  # a short turn stays whole, so a plan inside it decided nothing of it
            planned = turn
        seen = (scores > self.threshold) | (positions < max(self.sinks, planned - self.band))
        return seen & (positions >= 0)
