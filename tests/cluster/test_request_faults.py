"""Faults in the work of one request, at a worker: it ends with an error, no worker is lost, and the others go on."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from millpond.engine import step_executor
from millpond.errors import MillpondError
from tests.cluster.test_dispatch import PROMPTS, answers, expected, start
from tests.cluster.test_losses import POISON, ends_of
from tests.helpers.cluster.local import LocalCluster

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # a share of a few tokens

LAYOUTS = [{"replicas": 1}, {"replicas": 2}, {"prefill": 1, "decode": 1}]


def is_poison(groups: Any, readings: Any, place: str) -> bool:
    """Whether a pass has a part of the prompt that fails: of the prompt behind its beginning, or of its answer."""
    if place == "step":
        return any(completion.key[0].startswith(f"{POISON}#") for group in groups for completion in group.completions)
    return any(
        part.start and tuple(part.ids.tolist()) == PROMPTS[POISON][part.start : part.start + len(part.ids)]
        for part in readings
    )


@pytest.mark.covering
@pytest.mark.parametrize("place", ["prompt", "step"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_fault_ends_its_request_and_no_worker(
    layout: dict[str, int], place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = step_executor.run

    def failing(model: Any, groups: Any, readings: Any) -> Any:
        found = real(model, groups, readings)
        if is_poison(groups, readings, place):
            raise OverflowError("planted")
        return found

    prompts = [*PROMPTS]
    if len(prompts[POISON]) < 20:  # it is to be read in several parts
        prompts[POISON] = prompts[POISON] * 4
    monkeypatch.setattr(f"{__name__}.PROMPTS", prompts)
    monkeypatch.setattr(step_executor, "run", failing)
    with LocalCluster(**layout) as local:
        outputs = ends_of(start(local, prompts))
        error = outputs[POISON].error
        assert isinstance(error, MillpondError)
        assert "failed with OverflowError" in str(error)
        others = [output for index, output in enumerate(outputs) if index != POISON]
        assert [output.error for output in others] == [None] * len(others)
        assert answers(others) == [one for index, one in enumerate(expected()) if index != POISON]
        assert local.llm.figures().deaths == 0
        local.settle()


def test_a_worker_whose_step_does_not_come_back_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    real, goes_on, hung = step_executor.run, threading.Event(), threading.Event()

    def hanging(model: Any, groups: Any, readings: Any) -> Any:
        if groups and not hung.is_set():
            hung.set()
            goes_on.wait(60)
        return real(model, groups, readings)

    monkeypatch.setattr(step_executor, "run", hanging)
    seen: list[str] = []
    ages: list[float] = []

    def watch(_: Any, report: Any) -> None:
        ages.append(report.step_age_s)
        if report.trouble is not None:
            seen.append(report.trouble)

    with LocalCluster(watch, replicas=1, hang_s=0.5) as local:
        outputs = ends_of(start(local, PROMPTS))
        goes_on.set()
        assert answers(outputs) == expected()
        assert local.llm.figures().deaths == 1
        local.settle()
    assert any("one step of the engine has taken" in reason and "#" in reason for reason in seen), seen
    assert max(ages) > 0.5
