"""Workers of a cluster by role, and what lies between them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from millpond.errors import OptionError
from millpond_lab.cluster_plan.move_times import FREE_MOVES, MoveTimes
from millpond_lab.cluster_plan.profile import StepTimes

Role = Literal["both", "prefill", "decode"]
#: Most tokens of a step that reads, where a profile does not say.
STEP_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """One worker, an engine of its own.

    Attributes:
        role: reads prompts and decodes ("both"), or one of these. times: of its steps. devices: that it has.
        memory: bytes of its pages; None: no limit. step_tokens: most tokens of a step that reads. moves: what a move
            occupies it for.
    """

    role: Role
    times: StepTimes
    devices: int = 1
    memory: int | None = None
    step_tokens: int = STEP_TOKENS
    moves: MoveTimes = FREE_MOVES


@dataclass(frozen=True, slots=True)
class Link:
    """The way of a cache from the worker that read its prompt to the one that decodes; one move at a time per reader.

    Attributes:
        bytes_per_s: inf: moves take the latency alone. latency_s: of each move.
        memory: bytes that may wait in a worker that reads until they are fetched: it begins no step while there are as
            many, but ends one that it has begun; None: no limit.
    """

    bytes_per_s: float = float("inf")
    latency_s: float = 0.0
    memory: int | None = None

    def __post_init__(self) -> None:
        if not self.bytes_per_s > 0 or not self.latency_s >= 0:
            raise OptionError(f"a link of {self.bytes_per_s:g} bytes/s (above 0) and {self.latency_s:g} s (0 or more)")


@dataclass(frozen=True, slots=True)
class ClusterLayout:
    """All workers. Either all do both, or there are some of each of the other roles."""

    workers: tuple[WorkerPlan, ...]

    def __post_init__(self) -> None:
        roles = {worker.role for worker in self.workers}
        if roles not in ({"both"}, {"prefill", "decode"}):
            raise OptionError(
                f"a layout with the roles {sorted(roles)}: workers do both, or some read prompts and others decode"
            )

    @property
    def devices(self) -> int:
        """Of all workers."""
        return sum(worker.devices for worker in self.workers)

    @property
    def splits(self) -> bool:
        """Whether prompts are read apart from answers."""
        return self.workers[0].role != "both"

    @property
    def moves_cost(self) -> bool:
        """Whether a move occupies any of its workers."""
        return any(worker.moves != FREE_MOVES for worker in self.workers)

    def with_free_moves(self) -> ClusterLayout:
        """The same with moves that occupy no worker."""
        return ClusterLayout(tuple(replace(worker, moves=FREE_MOVES) for worker in self.workers))

    @property
    def name(self) -> str:
        """As in "2 both (1 device each)"."""
        kinds = dict.fromkeys((worker.role, worker.devices) for worker in self.workers)
        counts = [(sum((w.role, w.devices) == kind for w in self.workers), *kind) for kind in kinds]
        return " + ".join(f"{n} {role}" + f" x {devices} devices" * (devices > 1) for n, role, devices in counts)
