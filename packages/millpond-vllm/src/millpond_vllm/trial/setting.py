"""Settings of a trial: a method with its budget, or vLLM alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from millpond import OptionError
from millpond_vllm.settings import EngineSettings

#: Settings that are tried where none are named.
LADDER = ("snapkv:50%", "snapkv:30%", "snapkv:20%", "snapkv:10%")


@dataclass(frozen=True, slots=True)
class TrialSetting:
    """A setting.

    Attributes:
        method: Name of the method; None for vLLM alone.
        budget: Its budget.
    """

    method: str | None = None
    budget: str | None = None

    @classmethod
    def parse(cls, text: str) -> TrialSetting:
        """Return the setting that "method:budget" names.

        Raises:
            OptionError: it does not read so, or the engine would refuse it.
            BudgetError: the budget cannot be parsed.

        Example:
            >>> str(TrialSetting.parse("h2o:20%"))
            'h2o:20%'
        """
        method, separator, budget = text.partition(":")
        if not separator or not method or not budget:
            raise OptionError(f"setting {text!r} must read METHOD:BUDGET, for example snapkv:20%")
        found = cls(method, budget)
        EngineSettings.parse(found.engine())
        return found

    def engine(self) -> dict[str, Any]:
        """Return the engine's settings."""
        return {"method": self.method, "budget": self.budget}

    def __str__(self) -> str:
        return "stock" if self.method is None else f"{self.method}:{self.budget}"
