"""Protection of entries that no score can evict."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from millpond.errors import BudgetError, OptionError
from millpond.policy.view import View

#: A later turn of no more tokens is a question, not a text to be compressed.
SHORT_TURN_TOKENS = 64


def kept_beyond_budget(n_kept: int, least: int, budget: int) -> str:
    """Return why kept spans are refused that leave less of a budget than a method protects.

    Args:
        n_kept: Tokens of the spans, sinks left out.
        least: Entries that the method protects.
        budget: Entries per KV head.
    """
    return (
        f"{n_kept} kept tokens and {least} entries that the method protects are more than the budget of {budget} "
        f"entries per KV head; keep fewer tokens, or raise the budget to {n_kept + least} or more"
    )


@dataclass(frozen=True, slots=True)
class Protect:
    """Sinks, recent entries, a grace period and prompts.

    Attributes:
        sinks: The first positions of the text, never evicted.
        recent: The newest positions: a count (int) or a share of the budget (float in 0..1).
        grace: Steps for which a new entry cannot be evicted, whatever `recent` is.
        prompt: Whether prompts stay whole, see `prompts_that_fit`.
    """

    sinks: int = 0
    recent: int | float = 0
    grace: int = 0
    prompt: bool = False

    def __post_init__(self) -> None:
        for name in ("sinks", "recent", "grace"):
            if getattr(self, name) < 0:
                raise OptionError(f"{name}={getattr(self, name)} must not be negative")
        if isinstance(self.recent, float) and self.recent > 1:
            raise OptionError(f"recent={self.recent} is a share of the budget, 0 to 1; give a whole number for a count")

    def newest(self, budget: int) -> int:
        """Return how many of the newest positions are protected under `budget` entries."""
        count = math.floor(self.recent * budget) if isinstance(self.recent, float) else self.recent
        if isinstance(self.recent, float):
            count = min(count, budget - min(self.sinks, budget))
        return max(count, self.grace)

    def minimum(self) -> int:
        """Return the smallest budget with room for what is protected.

        A share of the budget takes what is left.
        """
        recent = 0 if isinstance(self.recent, float) else self.recent
        return max(1, self.sinks + max(recent, self.grace))

    def check(self, budget: int) -> None:
        """Check that what must be protected fits into `budget` entries.

        Raises:
            BudgetError: what must be protected does not fit into `budget` entries.
        """
        recent = self.newest(budget)
        if budget < max(1, self.sinks + recent):
            raise BudgetError(
                f"budget {budget} is smaller than sinks {self.sinks} + recent {recent}; "
                "raise budget or lower sinks, recent or grace"
            )

    def keeps_short_turn(self, tokens: int, budget: int) -> bool:
        """Whether a later turn of `tokens` stays whole: short, and half of what sinks leave."""
        return tokens <= min(SHORT_TURN_TOKENS, (budget - self.sinks) // 2)

    def prompts_that_fit(self, prompts: Sequence[tuple[int, int]], budget: int) -> list[tuple[int, int]]:
        """Return the spans of a text's prompts that stay whole, the newest first.

        A prompt stays if it leaves a place free besides the sinks, the newest entries and newer prompts that stay. Its
        length alone decides, so that it stays for as long as no other prompt follows. One that does not fit competes.

        Args:
            prompts: [begin, end) of the first prompt and of each later turn, oldest first.
            budget: Entries per head.
        """
        if not self.prompt:
            return []
        room, fitting = budget - self.sinks - self.newest(budget), []
        for begin, end in reversed(prompts):
            if end - begin < room:
                room -= end - begin
                fitting.append((begin, end))
        return fitting

    def spans(self, view: View, budget: int, turn: int = 0) -> list[tuple[int, int]]:
        """Return [begin, end) of protected positions.

        The newest `turn` is among them if `keeps_short_turn`. Spans may overlap, or begin before 0.
        """
        count = self.newest(budget)
        if self.keeps_short_turn(turn, budget):
            count = max(count, turn)
        return [(0, self.sinks), (view.seen - count, view.seen), *self.prompts_that_fit(view.prompts, budget)]

    def mask(self, view: View, budget: int, turn: int = 0) -> Tensor:
        """Return (H, N) bool: the protected entries, see `spans`."""
        protected = torch.zeros_like(view.valid)
        for begin, end in self.spans(view, budget, turn):
            if begin < end:
                protected |= (view.positions >= begin) & (view.positions < end)
        return view.valid & protected
