"""Requests whose caches grow: reserved by their ages, begun spread evenly, and never beyond the memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import millpond as mp
from millpond.engine.config import EngineConfig
from millpond.engine.diagonal_schedule import FILLINGS, PARTS, bytes_at, growth_bytes, peak_bytes
from millpond.engine.engine import Engine
from millpond.engine.offload.open import open_in_memory
from millpond.engine.offload.plan import Plan
from millpond.engine.request import Request
from millpond.engine.scheduler import Scheduler
from millpond.engine.scheduler_request import MemoryNeed, RequestStatus, SchedulerRequest

PROMPT, NEW = 64, 64
#: Bytes of a cache of a prompt and an answer, one byte a token; a limit that holds 12 of them at their end.
MOST, LIMIT = PROMPT + NEW, 12 * (PROMPT + NEW)


def request_of(key: str, new: int = NEW, **rest: Any) -> SchedulerRequest:
    later = growth_bytes(lambda n: PROMPT + n, new)
    return SchedulerRequest(key, PROMPT, MemoryNeed(PROMPT, 0, PROMPT + new), max_new_tokens=new, growth=later, **rest)


def at_age(age: int, new: int = NEW) -> SchedulerRequest:
    return request_of(str(age), new, num_computed_tokens=PROMPT, num_decoded_tokens=age, status=RequestStatus.DECODE)


def simulate(scheduler: Scheduler, n_jobs: int, new: Any = lambda n: NEW) -> tuple[int, int, int]:
    """Runs requests to their ends; returns steps, the most bytes held at a time, and the most requests."""
    for n in range(n_jobs):
        scheduler.add(request_of(str(n), new(n)))
    steps = most_bytes = most_jobs = 0
    while len(scheduler):
        step = scheduler.plan()
        assert not step.empty, "something runs whenever something waits"
        assert not step.preempt, "none makes way for another of its client"
        running = [*scheduler._running()]
        most_bytes = max(most_bytes, sum(PROMPT + one.num_decoded_tokens for one in running))
        most_jobs = max(most_jobs, len(running))
        for one, n in step.prefills:
            scheduler.add_computed_tokens(one, n)
        for one in step.decodes:
            if one.num_decoded_tokens == one.max_new_tokens:
                scheduler.remove(one)
        steps += 1
    return steps, most_bytes, most_jobs


def test_what_is_still_to_come_is_never_more_than_it_is() -> None:
    one = at_age(0, 50)
    for age in range(51):
        assert PROMPT + age <= bytes_at(one, age) <= PROMPT + age + -(-50 // PARTS) + 1
    assert bytes_at(one, 50) == one.reserved_bytes


def test_the_peak_is_that_of_every_step_to_come() -> None:
    scheduled = [at_age(age, new) for age, new in ((0, 64), (10, 30), (29, 30), (63, 64), (5, 200))]
    every_step = max(
        sum(
            bytes_at(one, one.num_decoded_tokens + step)
            for one in scheduled
            if one.num_decoded_tokens + step <= one.max_new_tokens
        )
        for step in range(1, 201)
    )
    assert peak_bytes(scheduled) == every_step
    assert peak_bytes([*scheduled, request_of("unread")]) == every_step + MOST
    assert peak_bytes([]) == 0


def test_even_ages_hold_the_mean_and_equal_ages_the_largest() -> None:
    even = [at_age(age) for age in range(0, NEW, NEW // 16)]
    assert peak_bytes(even) < 16 * (PROMPT + 0.6 * NEW)
    assert peak_bytes([at_age(3) for _ in range(16)]) == 16 * MOST


def test_more_run_together_inside_the_same_memory() -> None:
    """By the ratio of the largest cache to the mean, (2s + 2n) / (2s + n) = 4/3, less what parts and prompts cost."""
    whole = simulate(Scheduler(LIMIT, step_tokens=256, max_running=15), 240)
    spread = simulate(Scheduler(LIMIT, step_tokens=256, max_running=15, spread=True), 240)
    assert whole[2] == 12
    assert spread[2] == 15
    assert max(whole[1], spread[1]) <= LIMIT
    assert spread[0] < 0.92 * whole[0], "240 requests with 15 at a time in fewer steps, though it begins slowly"


@pytest.mark.parametrize("n_jobs", [1, 5, 40, 100])
def test_lengths_of_all_kinds_stay_inside_the_memory(n_jobs: int) -> None:
    scheduler = Scheduler(LIMIT, step_tokens=100, max_running=20, spread=True)
    _, most_bytes, _ = simulate(scheduler, n_jobs, lambda n: 1 + n * 37 % 150)
    assert most_bytes <= LIMIT


def test_few_requests_begin_at_once() -> None:
    few = Scheduler(None, step_tokens=2048, max_running=8, spread=True)
    for n in range(8):
        few.add(request_of(str(n)))
    assert len(few.plan().prefills) == 8
    many = Scheduler(None, step_tokens=2048, max_running=8, spread=True)
    for n in range(2 * 8 * FILLINGS):
        many.add(request_of(str(n)))
    begun = []
    for step_number in range(4 * NEW // 8):
        for one, n in many.plan().prefills:
            many.add_computed_tokens(one, n)
            begun.append(step_number)
    assert begun == [0, 8, 16, 24], "one in every eighth of an answer's length"


@pytest.mark.covering
@pytest.mark.parametrize(
    ("method", "kv", "ends"),
    [("full", "host", "host"), ("h2o", "host", "disk"), ("full", "disk", "host"), ("h2o", "disk", "disk")],
)
def test_tokens_are_those_without(method: str, kv: str, ends: Any, tmp_path: Path) -> None:
    """Many requests through a plan in the schedule "diagonal", in memory for a few of them."""
    model = mp.load_model("pond-recall")
    model.save_pretrained(tmp_path)
    prompts = [tuple((7 * n + k) % 400 + 4 for k in range(10 + n)) for n in range(24)]

    def answers(engine: Engine) -> list[Any]:
        for n, prompt in enumerate(prompts):
            params = mp.SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
            engine.add(Request(request_id=str(n), prompt=prompt, params=params))
        found = {one.request_id: one.error or one.completions[0].token_ids for one in engine.drain()}
        engine.check_integrity()
        return [found[str(n)] for n in range(len(prompts))]

    budget = None if method == "full" else "50%"
    reference = Engine(model, method=method, budget=budget)
    expected = answers(reference)
    reference.close()
    plan = Plan(weights={"disk": 1.0}, kv={kv: 1.0}, ends=ends, schedule="diagonal", block=4, prompt_rows=64)
    config = EngineConfig(method=method, budget=budget)
    opened = open_in_memory(tmp_path, "24MiB", plan, None, config)
    assert opened.config.spread_ages
    engine = Engine(opened.model, None, opened.config, streamed=opened.streamed, tier=opened.tier)
    assert answers(engine) == expected
    assert len(set(expected)) > 12, "answers differ, so that mixed-up requests would be seen"
    assert engine.stats().preemptions == 0
    if opened.tier is not None:
        assert opened.tier.bytes_read > 0
        assert opened.tier.bytes_used == 0
    engine.close()
