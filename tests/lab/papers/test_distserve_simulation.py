"""The table that DistServe's simulator gives with its A100 coefficients, cell by cell."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from millpond_lab.cluster_plan.layout import CacheSize, ClusterLayout, WorkerPlan
from millpond_lab.cluster_plan.profile import A100, A100_VLLM, StepTimes
from millpond_lab.cluster_plan.simulate import PlannedRequest, Simulation, sample
from millpond_lab.papers.distserve_simulation import Published

A, V = A100["opt-13b"], A100_VLLM["opt-13b"]
Pipeline = tuple[StepTimes, int]


Run = Callable[[list[PlannedRequest]], Sequence[tuple[float, float]]]


def bisect(lengths: list[tuple[int, int]], run: Run, devices: int, seed: int = 0) -> float:
    """Requests per second and device at which both 90th percentiles are in time, by their bisection."""
    low, high = 0.0, 5.0
    while high - low > 0.25:
        rate = (low + high) / 2
        found = np.array(run(sample(lengths, 300, rate * devices, seed)))
        first, each = np.quantile(found, 0.9, axis=0)
        low, high = (rate, high) if first < 0.2 and each < 0.1 else (low, rate)
    return low


def goodput(
    lengths: list[tuple[int, int]], read: Pipeline, decode: Pipeline | None, devices: int, seed: int = 0
) -> float:
    return bisect(lengths, lambda requests: Published(read, decode).run(requests), devices, seed)


def own_goodput(lengths: list[tuple[int, int]], read: Pipeline, decode: Pipeline, shared: int, seed: int) -> float:
    """The same by our simulation, with their 2 ms more for each step."""
    workers = tuple(
        WorkerPlan(role, times.with_overhead(2e-3), shared * stages, stages=stages)
        for role, (times, stages) in (("prefill", read), ("decode", decode))
    )
    layout = ClusterLayout(workers)

    def run(requests: list[PlannedRequest]) -> list[tuple[float, float]]:
        found = Simulation(layout, CacheSize(819_200, 819_200)).run(requests)
        assert found is not None
        return [(one.ttft, one.tpot or 0.0) for one in found]

    return bisect(lengths, run, layout.devices, seed)


def azure_lengths() -> list[tuple[int, int]]:
    """(prompt, output) tokens of the trace's requests that the table was made with."""
    trace = Path(__file__).parents[4] / "shared" / "data" / "traces" / "azure2023_conv.csv"
    if not trace.exists():
        pytest.skip("the published traces are not at hand")
    with trace.open(encoding="utf-8") as file:
        rows = [(int(row["ContextTokens"]), int(row["GeneratedTokens"])) for row in csv.DictReader(file)]
    lengths = [(prompt, answer) for prompt, answer in rows if prompt + answer < 2048 and min(prompt, answer) >= 4]
    assert len(lengths) == 16_519
    return lengths


@pytest.mark.parametrize(
    ("read", "decode", "devices", "expected"),
    [
        ((A[1], 1), (A[1], 1), 2, 1.09375),
        ((A[2], 1), (A[1], 1), 3, 1.25),
        ((A[2], 1), (A[2], 1), 4, 1.5625),
        ((V[1], 1), None, 1, 0.0),
        ((V[2], 1), None, 2, 0.78125),
    ],
)
def test_the_published_table(read: Pipeline, decode: Pipeline | None, devices: int, expected: float) -> None:
    assert goodput(azure_lengths(), read, decode, devices) == expected


@pytest.mark.parametrize(("shared", "stages"), [(2, 1), pytest.param(2, 2, marks=pytest.mark.slow)])
def test_our_simulation_is_inside_the_interval_of_theirs(shared: int, stages: int) -> None:
    """At (1, 2, 1, 2, 1), and with two stages: the mean over seeds lies between their lowest and highest one."""
    lengths, part = azure_lengths(), (A[shared], stages)
    theirs = [goodput(lengths, part, part, 2 * shared * stages, seed) for seed in range(3)]
    ours = [own_goodput(lengths, part, part, shared, seed) for seed in range(3)]
    assert min(theirs) <= statistics.fmean(ours) <= max(theirs)
    assert ours == pytest.approx(theirs, abs=0.16), "a step of the bisection"


def test_a_request_alone_takes_its_passes() -> None:
    request = PlannedRequest(0.0, 1000, 3)
    ((first, each),) = Published((A[1], 1), (A[1], 1)).run([request])
    times = A[1]
    # 2 ms and 0.1 us a token of context for each pass, and 1 ms for one with prompts
    assert first == pytest.approx(times.read_base + 1000 * times.per_token + 1e6 * times.per_square + 3.1e-3)
    few = times.decode[0]
    steps = 3 * (few.base + few.per_answer) + (1001 + 1002 + 1003) * few.per_entry
    assert each == pytest.approx((steps + 3 * 2e-3 + 1e-7 * (1000 + 1001 + 1002)) / 3)


def test_a_pipeline_passes_batches_on() -> None:
    """Two stages: each takes half of the time, and the second prompt is read while the first is in the second stage."""
    requests = [PlannedRequest(0.0, 500, 1), PlannedRequest(1e-6, 500, 1)]
    one, two = (Published((A[1], n), (A[1], 1)).run(requests) for n in (1, 2))
    stage = (A[1].read_base + 500 * A[1].per_token + 500**2 * A[1].per_square) / 2 + 2e-3
    assert two[0][0] == pytest.approx(2 * stage + 2e-3 + 500e-7)
    assert two[1][0] < one[1][0]
