"""Head budgets computed from the prompt."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor

from millpond.policy.allocation.heads import HeadAllocation
from millpond.policy.view import View


class DecidedHeads(HeadAllocation, Protocol):
    """An allocation for the heads of one view."""

    @property
    def grows(self) -> Tensor:
        """(H,) bool: the heads that keep all that comes while decoding, until the next plan."""
        ...


@runtime_checkable
class PromptHeadAllocation(Protocol):
    """An allocation that depends on the layer or on the prompt; its heads never compete while decoding."""

    @property
    def grows(self) -> bool:
        """Some heads keep all that comes while decoding, until the next plan."""
        ...

    def check(self, n_layers: int) -> None:
        """
        Raises:
            OptionError: it does not fit a model of this many layers.
        """
        ...

    def decide(self, view: View) -> DecidedHeads:
        """The allocation for the heads of `view`."""
        ...
