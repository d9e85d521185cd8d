"""The scheduler and the pool's memory limit as a state machine, without a model."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from millpond.engine.scheduler import READING_SHARE, Scheduler, Step
from millpond.engine.scheduler_request import MemoryNeed, RequestStatus, SchedulerRequest
from millpond.errors import OptionError
from tests.helpers.examples import examples

LIMIT = 1000


def request_of(key: str, prompt: int = 10, reading: int = 10, each: int = 10, **rest: object) -> SchedulerRequest:
    return SchedulerRequest(key, prompt, MemoryNeed(reading, 0, each), **rest)  # type: ignore[arg-type]


def run(scheduler: Scheduler, step: Step) -> None:
    """What an engine does with a step, without a model."""
    for one, n in step.prefills:
        scheduler.add_computed_tokens(one, n)


def test_decodes_come_first_and_prompts_fill_the_step() -> None:
    scheduler = Scheduler(None, step_tokens=16)
    first, second = request_of("a", 10), request_of("b", 40)
    scheduler.add(first)
    scheduler.add(second)
    step = scheduler.plan()
    assert (step.decodes, step.prefills) == ([], [(first, 10), (second, 6)])
    run(scheduler, step)
    step = scheduler.plan()
    assert (step.decodes, step.prefills) == ([first], [(second, 15)])


def test_prompts_are_read_however_many_decode() -> None:
    scheduler = Scheduler(None, step_tokens=16, max_running=100)
    scheduler.add(request_of("wide", 1, num_answers=50))
    run(scheduler, scheduler.plan())
    scheduler.add(late := request_of("late", 100))
    assert scheduler.plan().prefills == [(late, 16 // READING_SHARE)]


def test_a_whole_prompt_is_not_cut() -> None:
    scheduler = Scheduler(None, step_tokens=16)
    scheduler.add(short := request_of("short", 10))
    scheduler.add(long := request_of("long", 40, is_uncut=True))
    step = scheduler.plan()
    assert step.prefills == [(short, 10)]
    run(scheduler, step)
    assert scheduler.plan().prefills == [(long, 40)]


def test_nobody_overtakes_the_first_that_does_not_fit() -> None:
    scheduler = Scheduler(LIMIT)
    for key, each in (("a", 600), ("b", 600), ("c", 10)):
        scheduler.add(request_of(key, each=each))
    run(scheduler, scheduler.plan())
    assert [j.key for j in scheduler.plan().decodes] == ["a"]
    assert scheduler.count(RequestStatus.WAITING) == 2


def test_what_a_request_holds_after_its_plan_counts_not_its_prompt() -> None:
    scheduler = Scheduler(LIMIT, step_tokens=10)
    for n in range(6):
        scheduler.add(request_of(str(n), prompt=10, reading=600, each=80))
    for _ in range(20):
        run(scheduler, scheduler.plan())
    assert scheduler.count(RequestStatus.DECODE) == 6


def test_a_better_priority_makes_the_worst_leave() -> None:
    scheduler = Scheduler(LIMIT)
    scheduler.add(low := request_of("low", each=700, priority=5))
    run(scheduler, scheduler.plan())
    scheduler.add(high := request_of("high", each=700, priority=1))
    step = scheduler.plan()
    assert (step.preempt, step.resume, step.prefills) == ([low], [], [(high, 10)])
    run(scheduler, step)
    scheduler.remove(high)
    step = scheduler.plan()
    assert (step.resume, step.decodes) == ([low], [low])


def test_after_a_shortage_nobody_comes_back_before_somebody_ends() -> None:
    scheduler = Scheduler(LIMIT, overcommit=3)
    scheduled = [request_of(key, each=900) for key in "abc"]
    for one in scheduled:
        scheduler.add(one)
    run(scheduler, scheduler.plan())
    assert scheduler.preempt_newest() is scheduled[2]
    assert scheduler.plan().resume == []
    scheduler.remove(scheduled[0])
    assert scheduler.plan().resume == [scheduled[2]]


def test_deadlines() -> None:
    scheduler = Scheduler(None)
    scheduler.add(soon := request_of("soon", deadline=5.0))
    scheduler.add(request_of("late", deadline=9.0))
    scheduler.add(request_of("never"))
    assert scheduler.expired(4.9) == []
    assert scheduler.expired(5.0) == [soon]


@pytest.mark.parametrize("wrong", [{"step_tokens": 0}, {"max_running": 0}, {"overcommit": 0.5}])
def test_limits_out_of_range(wrong: dict[str, float]) -> None:
    with pytest.raises(OptionError, match="must be at least 1"):
        Scheduler(None, **wrong)  # type: ignore[arg-type]


class Life(RuleBasedStateMachine):
    """Jobs come, run, end and are cancelled; now and then pages run short."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = Scheduler(LIMIT, step_tokens=16, max_running=8)
        self.scheduled: list[SchedulerRequest] = []
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
        one = SchedulerRequest(
            f"{self.number}", prompt, MemoryNeed(reading, 20, each), width, client, priority, is_uncut=whole
        )
        self.number += 1
        self.scheduler.add(one)
        self.scheduled.append(one)
        self.left[one.key] = tokens

    @rule()
    def step(self) -> None:
        step = self.scheduler.plan()
        rows = sum(one.num_answers for one in step.decodes)
        read = sum(n for _, n in step.prefills)
        assert self.scheduler.reserved_bytes <= LIMIT
        assert sum(one.num_answers for one in self.scheduled if one.is_running) <= 8
        assert not step.empty or not self.scheduled, "somebody always runs"
        assert rows + read <= 16 + 2 or any(one.is_uncut for one, _ in step.prefills)
        assert not set(map(id, step.preempt)) & set(map(id, step.resume))
        for one in step.decodes:
            assert one.num_computed_tokens == one.num_prompt_tokens
            self.left[one.key] -= 1
        for one, n in step.prefills:
            assert n >= 1
            assert not one.is_uncut or n == one.num_prompt_tokens
            self.scheduler.add_computed_tokens(one, n)
        for one in [one for one in step.decodes if self.left[one.key] == 0]:
            self.end(one)

    @precondition(lambda self: sum(one.is_running for one in self.scheduled) > 1)
    @rule()
    def run_short(self) -> None:
        worst = max((one for one in self.scheduled if one.is_running), key=lambda one: one.queue_key)
        assert self.scheduler.preempt_newest() is worst

    @precondition(lambda self: any(one.num_answers > 1 for one in self.scheduled))
    @rule()
    def narrow(self) -> None:
        one = next(one for one in self.scheduled if one.num_answers > 1)
        self.scheduler.set_num_answers(one, one.num_answers - 1)

    @precondition(lambda self: self.scheduled)
    @rule(which=st.randoms(use_true_random=False))
    def cancel(self, which: object) -> None:
        self.end(which.choice(self.scheduled))  # type: ignore[attr-defined]

    def end(self, one: SchedulerRequest) -> None:
        self.scheduler.remove(one)
        self.scheduled.remove(one)

    @invariant()
    def counts_agree(self) -> None:
        assert len(self.scheduler) == len(self.scheduled)
        assert self.scheduler.count(*RequestStatus) == len(self.scheduled)

    def teardown(self) -> None:
        """All that is left comes to its end."""
        for _ in range(2000):
            if not self.scheduled:
                return
            self.step()
        raise AssertionError("somebody starved")


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=examples(60), stateful_step_count=30)
