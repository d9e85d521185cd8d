"""The plan of a run: methods, budgets, codecs, tasks and protocols, checked before a model is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import get_args

from millpond.budget import Budget
from millpond.codec import resolve
from millpond.errors import OptionError, unknown
from millpond_lab.evals.candidates.candidate import Candidate, find_candidate
from millpond_lab.evals.decoding.record import Cell, Protocol
from millpond_lab.evals.spec import Spec
from millpond_lab.evals.task import TASKS, Task

PROTOCOLS: tuple[Protocol, ...] = get_args(Protocol)


@dataclass(frozen=True)
class EvalPlan:
    """What to run. Everything is checked when it is made, before a model is loaded.

    Attributes:
        budgets: None: 20 % where a method needs a budget. dtype: of the model, as requested.
        calibration: a file, for the codecs that need one.
        only: (method, budget, codec) of the combinations that are run, as in their cells; None for all.

    Raises:
        OptionError: an unknown name or option (with a suggestion), or values that do not fit.
    """

    model: str
    methods: Sequence[Spec]
    tasks: Sequence[Spec]
    budgets: Sequence[str] | None = None
    codecs: Sequence[str] = ("auto",)
    protocols: Sequence[str] = ("aware",)
    samples: int = 40
    seed: int = 0
    batch_size: int = 8
    dtype: str = "auto"
    calibration: str | None = None
    only: Sequence[tuple[str, str, str]] | None = None
    candidates: dict[str, Candidate] = field(init=False)
    built: dict[str, Task] = field(init=False)

    def __post_init__(self) -> None:
        for name, value in (("samples", self.samples), ("batch_size", self.batch_size)):
            if value < 1:
                raise OptionError(f"{name}={value} must be at least 1")
        for protocol in self.protocols:
            if protocol not in PROTOCOLS:
                raise unknown("protocol", protocol, PROTOCOLS)
        for codec in self.codecs:
            resolve(codec)
        for budget in self.budgets or ():
            Budget.parse(budget)
        object.__setattr__(
            self, "candidates", {str(spec): find_candidate(spec, self.calibration) for spec in self.methods}
        )
        object.__setattr__(self, "built", {str(spec): spec.build(TASKS) for spec in self.tasks})
        if self.budgets and all(candidate.keeps_all for candidate in self.candidates.values()):
            raise OptionError(
                f"--budget {','.join(self.budgets)}: none of the methods ({', '.join(self.candidates)}) takes a "
                "budget; leave it out, or add a method that does"
            )
        cells = self.cells()
        missing = set(self.only or ()) - {(cell.method, cell.budget, cell.codec) for cell in cells}
        if missing:
            raise OptionError(
                f"only: {sorted(map(tuple, missing))[0]} is no combination of this plan's methods, budgets and codecs"
            )
        for cell in cells:
            self.candidates[cell.method].check(cell.budget, cell.codec)

    def cells(self) -> list[Cell]:
        """Every combination once, tasks outermost; a method that keeps all has the budget ""."""
        return [
            Cell(self.model, method, budget, codec, task, protocol, self.seed)
            for task in self.built
            for protocol in PROTOCOLS
            if protocol in self.protocols
            for method, candidate in self.candidates.items()
            for budget in (("",) if candidate.keeps_all else self.budgets or (candidate.default_budget,))
            for codec in self.codecs
            if self.only is None or (method, budget, codec) in self.only
        ]
