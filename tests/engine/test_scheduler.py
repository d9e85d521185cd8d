"""The scheduler and the pool's account as a state machine, without a model."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from millpond.engine.scheduler import READING_SHARE, Job, MemoryNeed, Scheduler, State, Step
from millpond.errors import OptionError
from tests.helpers.examples import examples

LIMIT = 1000


def job(key: str, prompt: int = 10, reading: int = 10, each: int = 10, **rest: object) -> Job:
    return Job(key, prompt, MemoryNeed(reading, 0, each), **rest)  # type: ignore[arg-type]


def run(scheduler: Scheduler, step: Step) -> None:
    """What an engine does with a step, without a model."""
    for one, n in step.chunks:
        scheduler.mark_read(one, n)


def test_decodes_come_first_and_prompts_fill_the_step() -> None:
    scheduler = Scheduler(None, step_tokens=16)
    first, second = job("a", 10), job("b", 40)
    scheduler.add(first)
    scheduler.add(second)
    step = scheduler.plan()
    assert (step.decodes, step.chunks) == ([], [(first, 10), (second, 6)])
    run(scheduler, step)
    step = scheduler.plan()
    assert (step.decodes, step.chunks) == ([first], [(second, 15)])


def test_prompts_are_read_however_many_decode() -> None:
    scheduler = Scheduler(None, step_tokens=16, most_running=100)
    scheduler.add(job("wide", 1, width=50))
    run(scheduler, scheduler.plan())
    scheduler.add(late := job("late", 100))
    assert scheduler.plan().chunks == [(late, 16 // READING_SHARE)]


def test_a_whole_prompt_is_not_cut() -> None:
    scheduler = Scheduler(None, step_tokens=16)
    scheduler.add(short := job("short", 10))
    scheduler.add(long := job("long", 40, whole=True))
    step = scheduler.plan()
    assert step.chunks == [(short, 10)]
    run(scheduler, step)
    assert scheduler.plan().chunks == [(long, 40)]


def test_nobody_overtakes_the_first_that_does_not_fit() -> None:
    scheduler = Scheduler(LIMIT)
    for key, each in (("a", 600), ("b", 600), ("c", 10)):
        scheduler.add(job(key, each=each))
    run(scheduler, scheduler.plan())
    assert [j.key for j in scheduler.plan().decodes] == ["a"]
    assert scheduler.count(State.WAITING) == 2


def test_what_a_request_holds_after_its_plan_counts_not_its_prompt() -> None:
    scheduler = Scheduler(LIMIT, step_tokens=10)
    for n in range(6):
        scheduler.add(job(str(n), prompt=10, reading=600, each=80))
    for _ in range(20):
        run(scheduler, scheduler.plan())
    assert scheduler.count(State.DECODING) == 6


def test_a_better_priority_makes_the_worst_leave() -> None:
    scheduler = Scheduler(LIMIT)
    scheduler.add(low := job("low", each=700, priority=5))
    run(scheduler, scheduler.plan())
    scheduler.add(high := job("high", each=700, priority=1))
    step = scheduler.plan()
    assert (step.out, step.back, step.chunks) == ([low], [], [(high, 10)])
    run(scheduler, step)
    scheduler.remove(high)
    step = scheduler.plan()
    assert (step.back, step.decodes) == ([low], [low])


def test_after_a_shortage_nobody_comes_back_before_somebody_ends() -> None:
    scheduler = Scheduler(LIMIT, overcommit=3)
    jobs = [job(key, each=900) for key in "abc"]
    for one in jobs:
        scheduler.add(one)
    run(scheduler, scheduler.plan())
    assert scheduler.victim() is jobs[2]
    assert scheduler.plan().back == []
    scheduler.remove(jobs[0])
    assert scheduler.plan().back == [jobs[2]]


def test_deadlines() -> None:
    scheduler = Scheduler(None)
    scheduler.add(soon := job("soon", deadline=5.0))
    scheduler.add(job("late", deadline=9.0))
    scheduler.add(job("never"))
    assert scheduler.expired(4.9) == []
    assert scheduler.expired(5.0) == [soon]


@pytest.mark.parametrize("wrong", [{"step_tokens": 0}, {"most_running": 0}, {"overcommit": 0.5}])
def test_limits_out_of_range(wrong: dict[str, float]) -> None:
    with pytest.raises(OptionError, match="must be at least 1"):
        Scheduler(None, **wrong)  # type: ignore[arg-type]


class Life(RuleBasedStateMachine):
    """Jobs come, run, end and are cancelled; now and then pages run short."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = Scheduler(LIMIT, step_tokens=16, most_running=8)
        self.jobs: list[Job] = []
        self.left: dict[str, int] = {}
        self.number = 0

    @rule(
        prompt=st.integers(1, 60),
        reading=st.integers(1, 500),
        each=st.integers(1, 120),
        width=st.integers(1, 4),
        priority=st.integers(0, 2),
        tokens=st.integers(1, 5),
        whole=st.booleans(),
        client=st.sampled_from("abc"),
    )
    def come(
        self, prompt: int, reading: int, each: int, width: int, priority: int, tokens: int, whole: bool, client: str
    ) -> None:
        one = Job(f"{self.number}", prompt, MemoryNeed(reading, 20, each), width, client, priority, whole=whole)
        self.number += 1
        self.scheduler.add(one)
        self.jobs.append(one)
        self.left[one.key] = tokens

    @rule()
    def step(self) -> None:
        step = self.scheduler.plan()
        rows = sum(one.width for one in step.decodes)
        read = sum(n for _, n in step.chunks)
        assert self.scheduler.reserved <= LIMIT
        assert sum(one.width for one in self.jobs if one.running) <= 8
        assert not step.empty or not self.jobs, "somebody always runs"
        assert rows + read <= 16 + 2 or any(one.whole for one, _ in step.chunks)
        assert not set(map(id, step.out)) & set(map(id, step.back))
        for one in step.decodes:
            assert one.read == one.prompt
            self.left[one.key] -= 1
        for one, n in step.chunks:
            assert n >= 1
            assert not one.whole or n == one.prompt
            self.scheduler.mark_read(one, n)
        for one in [one for one in step.decodes if self.left[one.key] == 0]:
            self.end(one)

    @precondition(lambda self: sum(one.running for one in self.jobs) > 1)
    @rule()
    def run_short(self) -> None:
        worst = max((one for one in self.jobs if one.running), key=lambda one: one.rank)
        assert self.scheduler.victim() is worst

    @precondition(lambda self: any(one.width > 1 for one in self.jobs))
    @rule()
    def narrow(self) -> None:
        one = next(one for one in self.jobs if one.width > 1)
        self.scheduler.set_width(one, one.width - 1)

    @precondition(lambda self: self.jobs)
    @rule(which=st.randoms(use_true_random=False))
    def cancel(self, which: object) -> None:
        self.end(which.choice(self.jobs))  # type: ignore[attr-defined]

    def end(self, one: Job) -> None:
        self.scheduler.remove(one)
        self.jobs.remove(one)

    @invariant()
    def counts_agree(self) -> None:
        assert len(self.scheduler) == len(self.jobs)
        assert self.scheduler.count(*State) == len(self.jobs)

    def teardown(self) -> None:
        """All that is left comes to its end."""
        for _ in range(2000):
            if not self.jobs:
                return
            self.step()
        raise AssertionError("somebody starved")


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=examples(60), stateful_step_count=30)
