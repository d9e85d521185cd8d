"""Bytes and entries of a request's cache under a method and a number format, as a plan of a cluster needs them."""

from __future__ import annotations

from dataclasses import dataclass

from millpond.budget import Budget
from millpond.engine.scheduler import MemoryNeed
from millpond.errors import OptionError


@dataclass(frozen=True, slots=True)
class CacheSize:
    """What a cache holds of a prompt and its answer.

    Attributes:
        entry_bytes: of one token in all layers while its prompt is read. stored_bytes: of a kept one afterwards, in
            the format of the cache. budget: entries that are kept when the prompt has been read; None: all.
        grows: whether tokens of the answer are added to the budget, or older entries are evicted for them.
    """

    entry_bytes: float
    stored_bytes: float
    budget: Budget | None = None
    grows: bool = True

    def __post_init__(self) -> None:
        if not 0 < self.stored_bytes <= self.entry_bytes:
            raise OptionError(
                f"{self.stored_bytes:g} bytes of a stored token must be above 0 and at most the {self.entry_bytes:g} "
                "of one that is being read"
            )
        if self.budget is not None and self.budget.kind == "bytes":
            raise OptionError(f"budget {self.budget}: a plan needs a share or tokens, since it compares requests")

    def kept(self, prompt: int, answer: int = 0) -> int:
        """Entries per KV head behind `answer` tokens of an answer."""
        entries = prompt if self.budget is None else min(prompt, self.budget.entries(prompt))
        return entries + (answer if self.grows else 0)

    def need(self, prompt: int, output: int) -> MemoryNeed:
        """Bytes that a request holds at most."""
        after = self.kept(prompt, output)
        return MemoryNeed(round(prompt * self.entry_bytes), 0, round(after * self.stored_bytes))

    def moved(self, prompt: int) -> int:
        """Bytes that go from one worker to another when the prompt has been read."""
        return round(self.kept(prompt) * self.stored_bytes)
