"""Clients share the engine by service: what one of them asks for never holds up another, whatever it holds already."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from millpond.engine.fairness import IDLE, FairQueue
from millpond.engine.scheduler import (
    MAX_PASSES,
    MAX_PIECES,
    MAX_UNTHROTTLED,
    PATIENCE,
    PROMPT_SERVICE,
    READING_SHARE,
    THROTTLED_PIECES,
    Scheduler,
    Step,
)
from millpond.engine.scheduler_request import MemoryNeed, RequestStatus, SchedulerRequest

STEP = 512


class Line:
    """A scheduler, and what an engine does with it: prompts are read, and answers of `tokens` end."""

    def __init__(self, limit: int | None = None, **options: int) -> None:
        self.scheduler = Scheduler(limit, step_tokens=STEP, **options)
        self.left: dict[SchedulerRequest, int] = {}
        self.served: Counter[str] = Counter()
        self.carried_out = 0

    def come(self, client: str, prompt: int, tokens: int, size: int = 0, **rest: object) -> SchedulerRequest:
        scheduled = SchedulerRequest(
            f"{len(self.left)}-{client}", prompt, MemoryNeed(size, 0, size), client_id=client, **rest
        )  # type: ignore[arg-type]
        self.scheduler.add(scheduled)
        self.left[scheduled] = tokens
        return scheduled

    def step(self) -> Step:
        step = self.scheduler.plan()
        self.carried_out += len(step.preempt)
        for scheduled, n in step.prefills:
            self.scheduler.add_computed_tokens(scheduled, n)
            self.served[scheduled.client_id] += n
        for scheduled in [
            *step.decodes,
            *(
                scheduled
                for scheduled, _ in step.prefills
                if scheduled.num_computed_tokens == scheduled.num_prompt_tokens
            ),
        ]:
            self.left[scheduled] -= 1
            self.served[scheduled.client_id] += scheduled in step.decodes
            if not self.left[scheduled]:
                self.scheduler.remove(scheduled)
        return step

    def work(self, scheduled: SchedulerRequest) -> tuple[int, int]:
        """Run until a request is done; how many steps that took, and how many tokens these had."""
        steps = tokens = 0
        while self.left[scheduled]:
            step = self.step()
            steps += 1
            tokens += len(step.decodes) + sum(n for _, n in step.prefills)
            assert steps < 10_000, "it never ends"
        return steps, tokens


@pytest.mark.parametrize("size", [0, 250, 1000], ids=["there is room", "four hold all memory", "one holds all memory"])
def test_twenty_tokens_behind_forty_long_prompts_of_another_client(size: int) -> None:
    line = Line(1000)
    for _ in range(40):
        line.come("many", 3500, 50, size)
    for _ in range(40):
        line.step()
    steps, tokens = line.work(line.come("one", 20, 20, 1))
    assert steps <= 21 + PATIENCE  # its prompt, a token each, and what it waits for room
    assert tokens <= 2 * STEP + 20 * (STEP // READING_SHARE + 60)
    assert line.carried_out <= 1


def test_all_slots_taken_by_another_client() -> None:
    line = Line(max_running=4)
    for _ in range(40):
        line.come("many", 100, 10_000)
    for _ in range(300):
        line.step()
    steps, _ = line.work(line.come("one", 20, 20))
    assert steps <= 21 + PATIENCE


def test_one_client_is_served_in_the_order_of_arrival() -> None:
    line = Line(1000)
    scheduled = [line.come("", 700, 3, 400) for _ in range(6)]
    ended = []
    while len(ended) < len(scheduled):
        line.step()
        ended += [scheduled for scheduled in scheduled if not line.left[scheduled] and scheduled not in ended]
    assert ended == scheduled
    assert line.carried_out == 0


@pytest.mark.parametrize("limit", [None, 1000])
def test_clients_get_the_same_service_however_much_they_ask_for(limit: int | None) -> None:
    line = Line(limit)
    for _ in range(30):
        line.come("long", 3500, 100, 300)
    for _ in range(300):
        line.come("short", 200, 40, 30)
    for _ in range(150):
        line.step()
    more, less = line.served.most_common(2)
    assert more[1] - less[1] <= 0.2 * more[1]
    assert line.carried_out <= sum(line.served.values()) / STEP


def test_who_comes_late_gets_no_credit_for_the_time_before() -> None:
    line = Line()
    for _ in range(60):
        line.come("early", 3500, 1)
    for _ in range(100):
        line.step()
    line.served.clear()
    for _ in range(60):
        line.come("late", 3500, 1)
    for _ in range(100):
        line.step()
    assert abs(line.served["late"] - line.served["early"]) <= 2 * STEP


def test_who_goes_and_comes_back_keeps_what_counts_against_it() -> None:
    clients = FairQueue()
    clients.add_request("other").served = 10
    greedy = clients.add_request("greedy")
    greedy.served = 500
    clients.remove_request(greedy)
    assert clients.add_request("greedy").served == 500
    assert clients.add_request("new").served == 10


def test_names_of_clients_that_are_gone_do_not_pile_up() -> None:
    clients = FairQueue()
    stays = clients.add_request("stays")
    for number in range(3 * IDLE):
        one = clients.add_request(str(number))
        one.served += 7
        stays.served += 9
        clients.remove_request(one)
    assert len(clients) <= IDLE + 1
    clients.remove_request(stays)
    assert len(clients) == 0


def test_tokens_that_were_taken_over_are_no_service() -> None:
    line = Line()
    scheduled = line.come("a", 100, 1)
    line.scheduler.plan()
    line.scheduler.add_computed_tokens(scheduled, 90, served=False)
    assert scheduled.client.served == 0
    line.scheduler.add_computed_tokens(scheduled, 5)
    assert scheduled.client.served == 5
    line.scheduler.add_computed_tokens(scheduled, 5)
    assert scheduled.client.served == 10 + PROMPT_SERVICE


def test_a_job_that_does_not_fit_holds_up_no_other_client_and_does_not_starve() -> None:
    line = Line(1000)
    line.come("runs", 10, 200, 600)
    line.step()
    large = line.come("large", 10, 1, 900)
    small = [line.come(f"small {n}", 10, 1000, 10) for n in range(2 * MAX_PASSES)]
    for _ in range(20):
        line.step()
    assert sum(scheduled.is_running for scheduled in small) == MAX_PASSES
    assert large.status is RequestStatus.WAITING
    line.work(large)


def test_two_clients_that_want_all_memory_do_not_push_each_other_out() -> None:
    line = Line(1000)
    for client in "abab":
        line.come(client, 3500, 300, 900)
    while len(line.scheduler):
        line.step()
    assert line.carried_out == 0


def test_nobody_is_carried_out_where_that_would_not_make_enough_room() -> None:
    line = Line(1000)
    line.come("first", 10, 500, 300, priority=-1)
    for _ in range(2):
        line.come("many", 600, 500, 350)
    for _ in range(5):
        line.step()
    line.come("one", 10, 1, 600)
    for _ in range(2 * PATIENCE):
        step = line.step()
        assert (len(step.preempt), len(step.resume), len(step.decodes)) == (0, 0, 3)


def seconds_of(step: Step) -> float:
    """As a small model takes: a step has its price, and so has each answer and each token that is read."""
    return 1 + sum(scheduled.num_answers for scheduled in step.decodes) * 0.25 + sum(n for _, n in step.prefills) * 0.05


@pytest.mark.parametrize("comes", ["first", "last"])
@pytest.mark.parametrize(("prompt", "width"), [(10, 128), (3500, 1), (3500, 64), (1, 1)])
def test_nobody_slows_another_client_down_to_less_than_half(prompt: int, width: int, comes: str) -> None:
    """Neither wide answers nor prompts, be they long or many, whoever has had more service."""
    line = Line()
    small = line.come("one", 20, 900) if comes == "first" else None
    for _ in range(3 * (comes == "last")):
        line.come("wide", prompt, 50_000, num_answers=min(width, 80))
    for _ in range(200):
        line.step()
    small = small or line.come("one", 20, 300)
    line.step()
    tokens, took, others = 0, 0.0, 0
    while line.left[small]:
        for _ in range(
            3 - len([scheduled for scheduled in line.left if line.left[scheduled] and scheduled is not small])
        ):
            line.come("wide", prompt, 50_000 if comes == "last" else 20, num_answers=min(width, 80))
        step = line.step()
        line.scheduler.record_step_time(step, seconds_of(step))
        took += seconds_of(step)
        tokens += small in step.decodes
        others += sum(scheduled.num_answers for scheduled in step.decodes if scheduled is not small) + sum(
            n for _, n in step.prefills
        )
    assert took / tokens <= 2 * 1.25, "alone a token takes 1.25"
    assert others > tokens / 2, "and the others go on"


def test_many_short_prompts_of_others_are_read_a_few_at_a_time_and_paid_back() -> None:
    line = Line()
    line.come("one", 20, 10_000)
    line.step()
    for number in range(200):
        line.come(f"short {number % 4}", 2, 2)
    took = 0.0
    for _ in range(100):
        step = line.step()
        seconds = 1 + 5 * len(step.prefills)
        line.scheduler.record_step_time(step, seconds)
        took += seconds
        assert len(step.prefills) <= THROTTLED_PIECES
        assert len(step.decodes) <= 1 + MAX_UNTHROTTLED
    assert 100 < took <= 100 * 1.6
    assert line.scheduler.count(RequestStatus.PREFILL) <= 4 * MAX_PIECES


def test_few_answers_of_others_decode_in_one_batch_all_the_time() -> None:
    line = Line()
    others = [line.come("many", 10, 10_000) for _ in range(8)]
    for _ in range(200):
        line.step()
    small = line.come("one", 20, 50)
    line.step()
    while line.left[small]:
        step = line.step()
        line.scheduler.record_step_time(step, seconds_of(step))
        assert set(step.decodes) == {small, *others}
        assert not any(scheduled.is_skippable for scheduled in others)


def test_the_time_of_a_step_is_taken_anew_when_others_decode() -> None:
    """Else the long steps of wide answers count as the usual ones of the narrow one that comes beside them."""
    line = Line()
    line.come("wide", 10, 50_000, num_answers=80)
    for _ in range(50):
        step = line.step()
        line.scheduler.record_step_time(step, seconds_of(step))
    small, passed = line.come("one", 20, 100), 0
    while line.left[small]:
        step = line.step()
        line.scheduler.record_step_time(step, seconds_of(step))
        passed += step.runs_throttled is False and small in step.decodes
    assert passed > 50


@pytest.mark.parametrize("seed", range(40))
def test_a_step_is_never_empty_while_requests_run(seed: int) -> None:
    """Whatever is owed: where all are throttled, nothing is gained by passing for others."""
    draw, line = random.Random(seed), Line(50_000)
    for _ in range(150):
        if draw.random() < 0.3:
            client, width = draw.choice("abcd"), draw.choice([1, 1, 1, 4, 16, 128])
            line.come(
                client, draw.choice([2, 40, 3_000]), draw.randint(1, 60), draw.choice([0, 100, 300]), num_answers=width
            )
        if not len(line.scheduler):
            continue
        step = line.step()
        assert not step.empty
        line.scheduler.record_step_time(step, draw.choice([0.001, 0.01, 5.0]))
