"""Plan of a peer's run: its presses x budgets x tasks, as cells next to ours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from millpond.budget import Budget
from millpond.errors import OptionError, unknown
from millpond_lab.evals.candidates.candidate import DEFAULT_BUDGET
from millpond_lab.evals.decoding.record import Cell, Protocol
from millpond_lab.evals.harness.plan import PROTOCOLS, EvalPlan
from millpond_lab.evals.task import TASKS

#: A peer compresses once, after the opening; its cache has no later turns.
KNOWN: tuple[Protocol, ...] = ("aware", "agnostic")


@dataclass(frozen=True)
class PeerPlan(EvalPlan):
    """As `EvalPlan`, for a peer; `full` is its own full cache. What its presses are called is the peer's to check.

    Attributes:
        peer: with its version, as it names itself.

    Raises:
        OptionError: an unknown task, protocol or budget, or a task that is not answered by decoding.
    """

    peer: str = "peer"

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise OptionError(f"samples={self.samples} must be at least 1")
        for protocol in self.protocols:
            if protocol not in PROTOCOLS:
                raise unknown("protocol", protocol, KNOWN)
            if protocol not in KNOWN:
                raise OptionError(f"a peer is evaluated in the protocols {' and '.join(KNOWN)}, not in {protocol!r}")
        for budget in self.budgets or ():
            Budget.parse(budget)
        if self.budgets and all(str(spec) == "full" for spec in self.methods):
            raise OptionError(f"--budget {','.join(self.budgets)}: full takes no budget; leave it out, or add a press")
        object.__setattr__(self, "candidates", {})
        object.__setattr__(self, "built", {str(spec): spec.build(TASKS) for spec in self.tasks})
        for name, task in self.built.items():
            if task.kind != "generate":
                raise OptionError(
                    f"task {name!r} is scored by {task.kind}, and a peer only decodes answers; leave it out here"
                )

    def cells(self) -> list[Cell]:
        """Every combination once, tasks outermost."""
        budgets: Sequence[str] = self.budgets or (DEFAULT_BUDGET,)
        return [
            Cell(self.model, str(spec), budget, "auto", task, protocol, self.seed, self.peer)
            for task in self.built
            for protocol in KNOWN
            if protocol in self.protocols
            for spec in dict.fromkeys(map(str, self.methods))
            for budget in (("",) if spec == "full" else budgets)
        ]
