"""A `ServedCluster` without a model: workers that a test names."""

from __future__ import annotations

from millpond.engine.cluster_figures import ClusterFigures, DrainResult, Role, WorkerInfo
from millpond.errors import OptionError
from tests.helpers.server.fake import FakeLLM


class FakeCluster(FakeLLM):
    """Two workers that read and one that decodes. drained: those that a client wanted to end, and if replaced."""

    def __init__(self) -> None:
        super().__init__()
        stats = self.stats()
        self.there = [
            WorkerInfo("prefill-0", "prefill", 11, "a", "serving", stats, 3, 70),
            WorkerInfo("prefill-1", "prefill", 12, "b", "draining", stats, 1, 0),
            WorkerInfo("decode-0", "decode", 13, "b", "serving", stats, 2, 0),
            WorkerInfo("decode-1", "decode", 0, "", "starting", None),
        ]
        self.drained: list[tuple[str, bool]] = []
        self.roles: list[Role | None] = []

    def workers(self) -> list[WorkerInfo]:
        return self.there

    def live(self) -> dict[str, int]:
        return {
            role: sum((one.role, one.state) == (role, "serving") for one in self.there)
            for role in ("prefill", "decode")
        }

    def figures(self) -> ClusterFigures:
        return ClusterFigures(
            moved=5,
            moved_bytes=1000,
            full_bytes=4000,
            replayed=2,
            deaths=1,
            move_s=0.5,
            checkpoints=4,
            checkpoint_bytes=700,
            resumed=3,
        )

    @property
    def step_age_s(self) -> float:
        return 0.0

    def trouble(self, limit_s: float) -> str | None:
        missing = [role for role, number in self.live().items() if not number]
        return f"no {missing[0]} worker serves" if missing else None

    async def drain(self, worker: str, *, replace: bool = True, role: Role | None = None) -> DrainResult:
        if not replace and self.live()[worker.partition("-")[0]] == 1:
            raise OptionError(f"worker {worker!r} is the only one of its role")
        self.drained.append((worker, replace))
        self.roles.append(role)
        return DrainResult(worker, 2, 1, 0.25)
