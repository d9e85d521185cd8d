"""Workers of a cluster by role, the bytes of their caches, and the times of moves between them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Literal

from millpond.budget import Budget
from millpond.engine.scheduler_request import MemoryNeed
from millpond.errors import OptionError
from millpond_lab.cluster_plan.profile import StepLoad, StepTimes


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


Role = Literal["both", "prefill", "decode"]
#: Most tokens of a step that reads, where a profile does not say.
STEP_TOKENS = 2048
#: Seconds that a pass of prompts takes more in each stage of a pipeline, for each of its stages: the constant of
#: DistServe's simulator for A100 devices (simdistserve/estimators/time_estimator.py).
STAGE_S = 1e-3


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """One worker, an engine of its own.

    Attributes:
        role: reads prompts and decodes ("both"), or one of these. times: of its steps, where no layers are elsewhere.
        devices: that it has, those of all stages. memory: bytes of its pages; None: no limit. step_tokens: most tokens
            of a step that reads. moves: what a move occupies it for.
        stages: of a pipeline, each with as many layers and `devices / stages` devices that share every layer. stage_s:
            seconds that a pass of prompts takes more in a stage, for each of the stages.
    """

    role: Role
    times: StepTimes
    devices: int = 1
    memory: int | None = None
    step_tokens: int = STEP_TOKENS
    moves: MoveTimes = FREE_MOVES
    stages: int = 1
    stage_s: float = STAGE_S

    def __post_init__(self) -> None:
        if self.stages < 1 or self.devices % self.stages:
            raise OptionError(f"{self.devices} devices in {self.stages} stages: each stage has as many, at least one")

    def stage_seconds(self, load: StepLoad) -> float:
        """How long a step is in each stage: T / pp, and c pp more where it reads prompts."""
        took = self.times.seconds(load)
        if self.stages == 1:
            return took
        return took / self.stages + (self.stage_s * self.stages if load.tokens else 0.0)


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
        """As in "2 both", "1 prefill x 4 devices in 2 stages + 1 decode"."""
        kinds = Counter((worker.role, worker.devices, worker.stages) for worker in self.workers)
        return " + ".join(
            f"{n} {role}" + f" x {devices} devices" * (devices > 1) + f" in {stages} stages" * (stages > 1)
            for (role, devices, stages), n in kinds.items()
        )


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
