"""Waiting times in closed form, and the simulation held to them."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest

from millpond.errors import OptionError
from millpond_lab.cluster_plan.layout import CacheSize, ClusterLayout, WorkerPlan
from millpond_lab.cluster_plan.profile import DecodeTimes, StepLoad, StepTimes
from millpond_lab.cluster_plan.simulate import PlannedRequest, Simulation, sample
from millpond_lab.papers.queueing import mean_ttft, mean_ttft_pipelined, mean_ttft_split_tensors

#: One prompt of 100 tokens takes 0.1 s, whatever else there is.
TIMES = StepTimes(0.1, 0.0, 0.0, (DecodeTimes(None, 0.0, 0.0, 0.0),))
LENGTHS = [(100, 1)] * 20_000


def simulated(rate: float, times: StepTimes, stages: int = 1) -> float:
    worker = WorkerPlan("both", times, stages, step_tokens=100, stages=stages, stage_s=0.0)
    layout = ClusterLayout((worker,))
    found = Simulation(layout, CacheSize(1, 1)).run(sample(LENGTHS, 10_000, rate, 3))
    assert found is not None
    return statistics.fmean(outcome.ttft for outcome in found)


@pytest.mark.parametrize("rate", [2.0, 5.0])
def test_the_simulation_waits_as_the_formula_says(rate: float) -> None:
    assert simulated(rate, TIMES) == pytest.approx(mean_ttft(rate, 0.1), rel=0.02)


@pytest.mark.parametrize("rate", [7.0, 15.0])
def test_a_pipeline_waits_as_the_formula_says(rate: float) -> None:
    free, waits = 0.0, list[float]()
    for request in sample(LENGTHS, 10_000, rate, 3):  # the queue of these very arrivals: a prompt enters every 0.05 s
        begins = max(free, request.at)
        free = begins + 0.05
        waits.append(begins + 0.1 - request.at)
    assert statistics.fmean(waits) == pytest.approx(mean_ttft_pipelined(rate, 0.1), rel=0.03)
    assert simulated(rate, TIMES, stages=2) == pytest.approx(statistics.fmean(waits), rel=0.015)


def test_a_short_prompt_waits_behind_a_long_one_in_each_stage() -> None:
    by_tokens = StepTimes(0.0, 1e-3, 0.0, (DecodeTimes(None, 0.0, 0.0, 0.0),))
    worker = WorkerPlan("both", by_tokens, 2, stages=2, stage_s=0.01)
    assert worker.stage_seconds(StepLoad(400)) == pytest.approx(0.4 / 2 + 2 * 0.01)
    assert replace(worker, devices=1, stages=1).stage_seconds(StepLoad(400)) == 0.4
    found = Simulation(ClusterLayout((replace(worker, stage_s=0.0),)), CacheSize(1, 1)).run(
        [PlannedRequest(0.0, 400, 1), PlannedRequest(0.01, 100, 1)]
    )
    assert found is not None
    # in the first stage from 0.2 to 0.25 s, in the second one behind the other's end at 0.4 s
    assert [one.ttft for one in found] == pytest.approx([0.4, 0.45 - 0.01])


def test_two_devices_in_closed_form() -> None:
    assert mean_ttft_split_tensors(7, 0.1, 1.6) == pytest.approx(0.0868, abs=5e-5)
    assert mean_ttft_pipelined(7, 0.1) == pytest.approx(0.1 + 7 * 0.01 / (4 * 1.3))
    # sharing layers is better at low rates, a pipeline at high ones
    assert mean_ttft_split_tensors(7, 0.1, 1.6) < mean_ttft_pipelined(7, 0.1)
    assert mean_ttft_split_tensors(15, 0.1, 1.6) > mean_ttft_pipelined(15, 0.1)


@pytest.mark.parametrize("rate", [0.0, 10.0, 11.0])
def test_a_queue_that_grows_for_ever_is_refused(rate: float) -> None:
    with pytest.raises(OptionError, match="must be above 0 and below 10"):
        mean_ttft(rate, 0.1)


def test_two_devices_are_not_three_times_as_fast() -> None:
    with pytest.raises(OptionError, match="1 to 2 times"):
        mean_ttft_split_tensors(1, 0.1, 3)
