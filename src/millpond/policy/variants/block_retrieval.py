"""Policies that store everything and attend to a budget of it, retrieved in blocks (InfLLM)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from millpond.codec.spec import Codec
from millpond.errors import BudgetError, OptionError
from millpond.option_ranges import check_parts
from millpond.policy.needs.declared import Needs
from millpond.policy.policy import WAY_OUT, Policy
from millpond.policy.protect import Protect

#: Queries of a prompt that look up one set of blocks, by default.
TOGETHER = 512


@dataclass(frozen=True, slots=True)
class AlwaysAttended(Protect):
    """What a query sees whatever is looked up: the sinks, the newest entries, and those that fill no block yet.

    Attributes:
        recent: the newest positions: a count or a share of the budget, never none or all of it.
        block: entries that are looked up together.
    """

    recent: int | float = 0.5
    block: int = 32

    def __post_init__(self) -> None:
        Protect.__post_init__(self)
        if self.block < 1:
            raise OptionError(f"block={self.block} must be at least 1")
        if self.recent == 0 or self.recent == 1.0:
            raise OptionError(f"local={self.recent} must be a count of at least 1, or a share above 0 and below 1")

    def local(self, budget: int) -> int:
        """The newest positions that a query sees, its own among them."""
        return max(1, math.floor(self.recent * budget) if isinstance(self.recent, float) else self.recent)

    def blocks(self, budget: int) -> int:
        """The blocks that fit besides what is always attended."""
        return (budget - self.sinks - self.local(budget) - self.block) // self.block

    def minimum(self) -> int:
        """The smallest budget that leaves room for a block that is looked up."""
        rest = self.sinks + 2 * self.block
        if isinstance(self.recent, float):  # the first budget of which the share leaves `rest`
            return math.floor((rest - 1) / (1 - self.recent)) + 1
        return rest + self.recent

    def check(self, budget: int) -> None:
        """
        Raises:
            BudgetError: no block could be looked up.
        """
        if budget < self.minimum():
            raise BudgetError(
                f"budget {budget} is smaller than {self.minimum()}: sinks {self.sinks}, local {self.recent}, one block "
                f"of {self.block} that fills up and one that is looked up; raise budget, or lower sinks, local or block"
            )


@dataclass(frozen=True, slots=True)
class BlockRetrievalPolicy(Policy):
    """Nothing leaves; the budget says how much of what is stored a query attends to.

    Attributes:
        protect: what is always attended.
        representatives: entries of a block whose mean key stands for it.
        together: queries of a prompt that look up one set of blocks.
        far: where a looked-up entry stands: all at one distance, after the local ones, or where the text put them.
    """

    protect: AlwaysAttended = field(default_factory=AlwaysAttended)
    representatives: int = 4
    together: int = TOGETHER
    far: Literal["one_distance", "true"] = "one_distance"

    def __post_init__(self) -> None:
        Policy.__post_init__(self)
        for name in ("representatives", "together"):
            if getattr(self, name) < 1:
                raise OptionError(f"{name}={getattr(self, name)} must be at least 1")
        if self.representatives > self.protect.block:
            raise OptionError(f"representatives={self.representatives} of a block of {self.protect.block}; take fewer")

    def check_prompt(self, n_tokens: int) -> None:
        Policy.check_prompt(self, n_tokens)
        check_parts("together", self.together, TOGETHER, n_tokens)

    @property
    def needs(self) -> Needs:
        return Needs(whole_prompt=True, block_lookup=self)

    @property
    def takes_budget(self) -> bool:
        """The budget limits attended entries."""
        return True

    @property
    def needs_unrotated_queries(self) -> bool:
        """Blocks are compared, and looked up, by keys before RoPE."""
        return True

    def kept_refusal(self) -> str | None:
        return (
            "this method holds every token and each query attends to the blocks that it looks up, so that no span is "
            "sure to be seen; use a method that evicts"
        )

    def codec_refusal(self, codec: Codec) -> str | None:
        return f"this method looks single positions up in plain pages; {WAY_OUT}"
