"""What `cluster plan` writes is what `serve --layout` reads."""

from __future__ import annotations

import json
from pathlib import Path

from millpond.cluster.layout_file import PlannedWorkers, load_plan
from millpond_lab.cluster_plan.layout import ClusterLayout, WorkerPlan
from millpond_lab.cluster_plan.place import Goodput
from millpond_lab.cluster_plan.profile import DecodeTimes, StepTimes
from millpond_lab.cluster_plan.report import Verdict, to_json


def test_a_written_plan_fills_the_devices(tmp_path: Path) -> None:
    times = StepTimes(1.0, 0.1, 0.0, (DecodeTimes(None, 1.0, 0.0, 0.0),), 0.0)
    workers = tuple(WorkerPlan(role, times) for role in ("prefill", "decode", "decode"))  # type: ignore[arg-type]
    best = Goodput(ClusterLayout(workers), (1.0,), 0.0)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(to_json([best], Verdict(best, True, ()), 7)), encoding="utf-8")
    assert load_plan(str(path)) == PlannedWorkers(0, 2, 4, 1)
